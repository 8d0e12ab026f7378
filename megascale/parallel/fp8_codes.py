"""FP8 codes of the weights that a rank updates, in which they are gathered (`bucket_storage.Sharded`).

Once a step a rank casts its shards, but frozen ones once. A scale covers elements of other ranks: the amaxes of blocks
are reduced to their maxima first, for all weights in one call, so that the codes are those of a cast of whole weights.
A recipe has codes if they serve forward and dgrad; other weights are gathered in the compute dtype, and cast where they
are used.

With zero = 1 or 2 the codes of all ranks are gathered after the cast, and kept for the step; with zero = 3 for each
use. A bucket with other modules than FP8 layers, such as small models have, is gathered in the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.comm.group import Group
from megascale.device import profiler_range
from megascale.layout.buckets import ALIGNMENT, Slot
from megascale.layout.chunks import BucketSize
from megascale.ops.fp8 import scales_of
from megascale.ops.quantized import Quantized
from megascale.parallel.bucket import Bucket
from megascale.parallel.fp8_state import Fp8State


class _Part(NamedTuple):
    """This rank's part of a weight: `values` in the compute dtype, and `codes`, u8. Other ranks have the elements
    `before` and `after` it in its first and last row of blocks, of `k` elements. `amaxes`: of the blocks in these rows.
    """

    name: str
    values: Tensor
    codes: Tensor
    before: int
    after: int
    k: int
    amaxes: Tensor

    @property
    def padded(self) -> Tensor:
        """The part in whole rows of blocks [rows, k], with zeros for other ranks' elements."""
        others = self.before, self.after
        return (F.pad(self.values, others) if any(others) else self.values).view(-1, self.k)


class _Weights(NamedTuple):
    """Weights of `buckets` of the same ranks: this rank's `parts`, and `amaxes`, f32, and `scales` of all blocks; the
    first `over_tp` blocks have elements of all tp ranks.
    """

    buckets: Sequence[Bucket]
    parts: Sequence[_Part]
    amaxes: Tensor
    scales: Tensor
    over_tp: int


class ShardedCodes:
    """The codes of this rank's shards of `buckets`, which decode what they gather with the scales of whole weights.
    `overlap`: they are gathered in the background.
    """

    def __init__(self, buckets: Iterable[Bucket], state: Fp8State, tp: Group, *, overlap: bool) -> None:
        self._state, self._tp, self._quantizer = state, tp, state.recipe.rows["weight"]
        self._overlap = overlap
        alike = dict[tuple[bool, tuple[str, ...]], list[Bucket]]()
        for bucket in buckets:
            size = BucketSize.of(bucket.layout)
            coded = 0 if state.changes else size.coded(state.layers, self._quantizer.spec)
            if coded and (bucket.layout.shard_axes.weight or bucket.storage.inner.size > 1):
                bucket.keep_codes(coded)
                alike.setdefault((bucket.frozen, size.reduce_axes), []).append(bucket)
        self._weights, self._coded = [*map(self._shard, alike.values())], [*chain(*alike.values())]
        self._kept = [bucket for bucket in self._coded if bucket.sharded.gathered is not None]
        for bucket in self._kept:
            bucket.bind_weights(None)
            if (memory := bucket.sharded.gathered) is not None:
                bucket.bind_gathered(memory)

    def encode(self) -> None:
        """Cast this rank's shards after an update of the weights, and gather what is kept; of frozen ones after a load
        alone, unless scales follow a history. A collective call.
        """
        delayed = self._quantizer.spec.scaling == "delayed"
        changed = {each for each in self._coded if each.outdated or delayed or not each.frozen}
        for weights in self._weights:
            if changed.issuperset(weights.buckets):
                self._scale(weights)
            elif not self._state.collects_stats:
                continue
            with profiler_range("quantize"):
                for part in weights.parts:
                    self._cast(part)
        for bucket in (bucket for bucket in self._kept if bucket in changed):
            with bucket.group.recorder.scope(bucket.chunk):
                bucket.sharded.gather_codes()
            if not self._overlap:
                bucket.storage.acquire_weights()

    def _scale(self, weights: _Weights) -> None:
        """Find the scales of weights, by the amaxes of all blocks or of their history."""
        spec = self._quantizer.spec
        for bucket in weights.buckets:
            bucket.storage.acquire_weights()
            bucket.outdated = False
        if self._state.uses_own_amax(spec):
            self._find(weights)
        elif spec.scaling == "delayed":
            for part in weights.parts:
                part.amaxes.copy_(self._state.history_amax(part.name))
        weights.scales.copy_(scales_of(weights.amaxes, self._quantizer.element, spec.scale))

    def _find(self, weights: _Weights) -> None:
        """Find the amaxes of all blocks, which have elements on the ranks that share the weights."""
        amaxes = weights.amaxes.zero_()
        with profiler_range("quantize"):
            for part in weights.parts:
                if len(part.values):
                    part.amaxes.copy_(self._quantizer.amax(part.padded))
        all_reduce(weights.buckets[0].storage.inner, amaxes, "max", label="fp8 amax")
        if weights.over_tp:
            all_reduce(self._tp, amaxes[: weights.over_tp], "max", label="fp8 amax")

    def _cast(self, part: _Part) -> None:
        if not len(part.values):
            return
        record = self._state.record(part.name) if part.name in self._state.weights else None
        cast = self._quantizer.encode(part.padded, part.amaxes, record=record)
        assert cast.data.dtype == self._quantizer.element.dtype, "numbers that stand for codes are declared `emulated`"
        part.codes.copy_(cast.codes.view(-1)[part.before :][: len(part.codes)])
        if record is not None and record.sums is not None:
            record.sums[2] -= part.before + part.after  # counted as elements

    def _shard(self, buckets: Sequence[Bucket]) -> _Weights:
        """Allocate amaxes and scales of the weights of `buckets`, which the same ranks shard."""
        quantizer, block, device = self._quantizer, self._quantizer.spec.block, buckets[0].weights.device
        slots = [(b, slot) for b in buckets for slot in b.layout.slots if slot.stop <= b.sharded.coded]
        over_tp = [block.spans(slot.parameter.sharding.get("tp")) for _, slot in slots]
        slots = [each for first in (True, False) for each, cut in zip(slots, over_tp, strict=True) if cut is first]
        shapes = [bucket.parameters[slot.parameter.name].flatten(0, -2).shape for bucket, slot in slots]
        grids = [block.grid(*shape) for shape in shapes]
        sizes = [*map(math.prod, grids)]
        amaxes = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        scales = scales_of(amaxes, quantizer.element, quantizer.spec.scale)
        parts, of_weights = list[_Part](), (flat.split(sizes) for flat in (amaxes, scales))
        for (bucket, slot), shape, grid, *flat in zip(slots, shapes, grids, *of_weights, strict=True):
            largest, scale = (each.view(grid) for each in flat)
            part = _part(bucket, slot, largest, block.rows, shape[1] if block.rows else ALIGNMENT)
            codes, requantises = part.codes.view(quantizer.element.dtype), quantizer.spec.requantises
            bucket.coded[part.name] = Quantized(codes, scale, block, requantises=requantises)
            parts.append(part)
            if quantizer.spec.scaling == "static":
                largest.fill_(self._state.static_amaxes(slot.parameter.parts[0].std)["weight"])
        return _Weights(buckets, parts, amaxes, scales, sum(sizes[: sum(over_tp)]))


def _part(bucket: Bucket, slot: Slot, amaxes: Tensor, rows: int | None, k: int) -> _Part:
    """Cut this rank's part from a weight, in `rows` of k elements of a block; None: in k elements of the only one."""
    start, stop = bucket.storage.held
    low = min(max(slot.start, start), slot.stop)
    high, unit = max(low, min(slot.stop, stop)), k * (rows or 1)
    first, last = (low - slot.start) // unit, -(-(high - slot.start) // unit)
    before, after = low - slot.start - first * unit, last * unit - (high - slot.start)
    values, codes = (flat[low - start : high - start] for flat in (bucket.weights, bucket.sharded.codes))
    return _Part(slot.parameter.name, values, codes, before, after, k, amaxes[first:last] if rows else amaxes)
