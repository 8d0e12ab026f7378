"""FP8 codes of sharded weights (`zero = 3`), in which they are gathered (`bucket_storage.ShardedAll`).

Once a step a rank casts its shards. A scale covers elements of other ranks: the amaxes of blocks are reduced to their
maxima first, for all weights in one call, so that the codes are those of a cast of whole weights. A recipe has codes if
they serve forward and dgrad; other weights are gathered in the compute dtype, and cast where they are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.catalog.recipes import TENSOR
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
    """Weights of `buckets` of the same ranks: this rank's `parts`, and `amaxes` and `scales` of all blocks, f32."""

    buckets: Sequence[Bucket]
    parts: Sequence[_Part]
    amaxes: Tensor
    scales: Tensor


class ShardedCodes:
    """The codes of this rank's shards of `buckets`, which decode what they gather with the scales of whole weights."""

    def __init__(self, buckets: Iterable[Bucket], state: Fp8State, tp: Group) -> None:
        self._state, self._tp, self._quantizer = state, tp, state.recipe.rows["weight"]
        by_axes = dict[tuple[str, ...], list[Bucket]]()
        for bucket in buckets:
            size = BucketSize.of(bucket.first_module, bucket.layout)
            if coded := size.coded(state.layers, self._quantizer.spec):
                bucket.sharded.keep_codes(coded)
                by_axes.setdefault(size.reduce_axes, []).append(bucket)
        self._weights = [self._shard(each) for each in by_axes.values()]

    def encode(self) -> None:
        """Cast this rank's shards after an update of the weights. A collective call."""
        own = self._state.uses_own_amax(self._quantizer.spec)
        for buckets, parts, amaxes, scales in self._weights:
            for bucket in buckets:
                bucket.storage.acquire_weights()
            if own:
                self._find(parts, amaxes.zero_(), buckets[0].storage.inner)
            elif self._quantizer.spec.scaling == "delayed":
                for part in parts:
                    part.amaxes.copy_(self._state.history_amax(part.name))
            with profiler_range("quantize"):
                scales.copy_(scales_of(amaxes, self._quantizer.element, self._quantizer.spec.scale == "pow2"))
                for part in parts:
                    self._cast(part)

    def _find(self, parts: Sequence[_Part], amaxes: Tensor, shards: Group) -> None:
        """Find the amaxes of all blocks, of which `parts` have some: their elements are in `shards`, and on tp."""
        with profiler_range("quantize"):
            for part in parts:
                if len(part.values):
                    part.amaxes.copy_(self._quantizer.amax(part.padded))
        for group in (shards, *([self._tp] if self._quantizer.spec.block == TENSOR else [])):
            all_reduce(group, amaxes, "max", label="fp8 amax")

    def _cast(self, part: _Part) -> None:
        if not len(part.values):
            return
        record = self._state.record(part.name) if part.name in self._state.weights else None
        codes = self._quantizer.encode(part.padded, part.amaxes, record=record).codes.view(-1)
        part.codes.copy_(codes[part.before :][: len(part.codes)])
        if record is not None and record.counts is not None:
            record.counts[2] -= part.before + part.after  # counted as elements

    def _shard(self, buckets: Sequence[Bucket]) -> _Weights:
        """Allocate amaxes and scales of the weights of `buckets`, which the same ranks shard."""
        quantizer, (rows, k), device = self._quantizer, self._quantizer.spec.block, buckets[0].weights.device
        slots = [(b, slot) for b in buckets for slot in b.layout.slots if slot.stop <= b.sharded.coded]
        shapes = [bucket.parameters[slot.parameter.name].flatten(0, -2).shape for bucket, slot in slots]
        grids = [(shape[0] // rows, shape[1] // k) if rows and k else () for shape in shapes]
        sizes = [*map(math.prod, grids)]
        amaxes, scales = torch.zeros(2, sum(sizes), dtype=torch.float32, device=device)
        parts, of_weights = list[_Part](), (flat.split(sizes) for flat in (amaxes, scales))
        for (bucket, slot), shape, grid, *flat in zip(slots, shapes, grids, *of_weights, strict=True):
            largest, scale = (each.view(grid) for each in flat)
            part = _part(bucket, slot, largest, rows, shape[1] if rows else ALIGNMENT)
            bucket.coded[part.name] = Quantized(part.codes.view(quantizer.element.dtype), scale, quantizer.spec.block)
            parts.append(part)
            if quantizer.spec.scaling == "static":
                largest.fill_(self._state.static_amaxes(slot.parameter.parts[0].std)["weight"])
        return _Weights(buckets, parts, amaxes, scales)


def _part(bucket: Bucket, slot: Slot, amaxes: Tensor, rows: int | None, k: int) -> _Part:
    """Cut this rank's part from a weight, in `rows` of k elements of a block; None: in k elements of the only one."""
    start, stop = bucket.storage.held
    low = min(max(slot.start, start), slot.stop)
    high, unit = max(low, min(slot.stop, stop)), k * (rows or 1)
    first, last = (low - slot.start) // unit, -(-(high - slot.start) // unit)
    before, after = low - slot.start - first * unit, last * unit - (high - slot.start)
    values, codes = (flat[low - start : high - start] for flat in (bucket.weights, bucket.sharded.codes))
    return _Part(slot.parameter.name, values, codes, before, after, k, amaxes[first:last] if rows else amaxes)
