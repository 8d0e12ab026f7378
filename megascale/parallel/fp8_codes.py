"""FP8 codes of sharded weights (`zero = 3`), in which they are gathered (`bucket_storage.ShardedAll`).

Once a step a rank casts its shards. A scale covers elements of other ranks: the amaxes of blocks are reduced to their
maxima first, for all weights in one call, so that the codes are those of a cast of whole weights. A recipe has codes if
they serve forward and dgrad; other weights are gathered in the compute dtype, and cast where they are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
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
from megascale.ops.recipe import Quantizer
from megascale.parallel.bucket import Bucket
from megascale.parallel.fp8_state import Fp8State


class _Part(NamedTuple):
    """This rank's part of a weight: `values` in the compute dtype, and `codes`, u8. Others have so many elements
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
    """Weights that the ranks of `group` shard: this rank's `parts`, and `amaxes` and `scales` of all blocks, f32."""

    group: Group
    parts: Sequence[_Part]
    amaxes: Tensor
    scales: Tensor


class ShardedCodes:
    """The codes of this rank's shards of `buckets`, which decode what they gather with the scales of whole weights."""

    def __init__(self, buckets: Iterable[Bucket], state: Fp8State, tp: Group) -> None:
        self._state, self._tp, self._quantizer = state, tp, state.recipe.weight
        self._buckets = list[Bucket]()
        for bucket in buckets:
            size = BucketSize.of(bucket.first_module, bucket.layout)
            if coded := size.coded(state.layers, self._quantizer.block):
                bucket.sharded.keep_codes(coded)
                self._buckets.append(bucket)
        kinds = groupby(sorted(self._buckets, key=_reduce_axes), key=_reduce_axes)
        self._weights = [self._shard(list(buckets)) for _, buckets in kinds]

    def encode(self) -> None:
        """Cast this rank's shards after an update of the weights. A collective call."""
        own = self._state.uses_own_amax(self._quantizer)
        for bucket in self._buckets:
            bucket.storage.acquire_weights()
        for weights in self._weights:
            with profiler_range("quantize"):
                self._write_amaxes(weights, own)
            if own:
                all_reduce(weights.group, weights.amaxes, "max", label="fp8 amax")
            if own and self._quantizer.block == TENSOR:
                all_reduce(self._tp, weights.amaxes, "max", label="fp8 amax")
            with profiler_range("quantize"):
                weights.scales.copy_(scales_of(weights.amaxes, self._quantizer.element))
                for part in weights.parts:
                    self._cast(part)

    def _write_amaxes(self, weights: _Weights, own: bool) -> None:
        """Write the amaxes of this rank's elements, if scales are their `own`, or those expected from the history."""
        if own:
            weights.amaxes.zero_()
        for part in weights.parts:
            if own and len(part.values):
                part.amaxes.copy_(self._quantizer.amax(part.padded))
            elif not own and self._quantizer.scaling == "delayed":
                part.amaxes.copy_(self._state.history_amax(part.name))

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
        quantizer, device, parts = self._quantizer, buckets[0].weights.device, list[_Part]()
        of_bucket = [(bucket, slot) for bucket in buckets for slot in bucket.layout.slots]
        slots = [(bucket, slot) for bucket, slot in of_bucket if slot.stop <= bucket.sharded.coded]
        shapes = [bucket.parameters[slot.parameter.name].flatten(0, -2).shape for bucket, slot in slots]
        rows, k = quantizer.block
        grids = [() if rows is None or k is None else (shape[0] // rows, shape[1] // k) for shape in shapes]
        sizes = [*map(math.prod, grids)]
        amaxes, scales = torch.zeros(2, sum(sizes), dtype=torch.float32, device=device)
        for (bucket, slot), shape, grid, *flat in zip(
            slots, shapes, grids, amaxes.split(sizes), scales.split(sizes), strict=True
        ):
            largest, scale = (of_weight.view(grid) for of_weight in flat)
            bucket.decoders[slot.parameter.name] = partial(_decode, shape, scale, quantizer)
            parts.append(_part(bucket, slot, shape[1], largest, rows))
            if quantizer.scaling == "static":
                largest.fill_(self._state.static_amaxes(slot.parameter.parts[0].std)["weight"])
        return _Weights(buckets[0].storage.inner, parts, amaxes, scales)


def _reduce_axes(bucket: Bucket) -> tuple[str, ...]:
    return bucket.layout.reduce_axes


def _part(bucket: Bucket, slot: Slot, k: int, amaxes: Tensor, rows: int | None) -> _Part:
    """Cut this rank's part, of no elements if there is none, from a weight of rows of k with `amaxes` of its blocks of
    `rows` each; None: one block.
    """
    start, stop = bucket.storage.held
    low = min(max(slot.start, start), slot.stop)
    high = max(low, min(slot.stop, stop))
    k = ALIGNMENT if rows is None else k  # shards have whole runs of so many elements
    unit = k * (rows or 1)
    first, last = (low - slot.start) // unit, -(-(high - slot.start) // unit)
    before, after = low - slot.start - first * unit, last * unit - (high - slot.start)
    values, codes = (flat[low - start : high - start] for flat in (bucket.weights, bucket.sharded.codes))
    own = amaxes if rows is None else amaxes[first:last]
    return _Part(slot.parameter.name, values, codes, before, after, k, own)


def _decode(shape: torch.Size, scale: Tensor, quantizer: Quantizer, codes: Tensor) -> Quantized:
    return Quantized(codes.view(quantizer.element.dtype).view(shape), scale, quantizer.block)
