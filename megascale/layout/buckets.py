"""Buckets: the layout of parameters in a contiguous buffer.

A bucket is the unit of gradient reduction, data-parallel sharding and parameter all-gather. Its shards are equal
contiguous ranges: a reduce-scatter or an all-gather is a single collective without copies (MegaScale 3.2, where a
bucket is a model chunk). Parameters are sorted such that those with equal optimizer flags, and those that tp
replicates, are contiguous ranges as well; replicas with partial gradients (`ParamSpec.tp_partial`) come first:

    | sharded by tp: matrices, vectors | replicated over tp: partial, matrices, vectors | padding |
    |     shard 0      |      shard 1      |      shard 2      |      shard 3           |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megascale.layout.tensors import ParamSpec, TensorSpec
from megascale.layout.topology import Topology

ALIGNMENT = 64
"""Elements to which the starts of parameters and shards are aligned: 128 bytes or more in every dtype."""


@dataclass(frozen=True)
class Slot:
    """A parameter's range in a bucket, in elements."""

    parameter: ParamSpec
    start: int
    stop: int


@dataclass(frozen=True)
class BucketLayout:
    """The slots of a bucket in order, and its size `numel`, a multiple of `num_shards`. All sizes are in elements.

    `axes`: the axes of parallelism over which the bucket is reduced and sharded; `num_shards`: ranks of such a group.
    `replicated`: the range of the parameters that tp replicates; `tp_partial`: those whose gradient is always partial.
    """

    slots: tuple[Slot, ...]
    numel: int
    axes: tuple[str, ...]
    num_shards: int
    replicated: tuple[int, int]
    tp_partial: tuple[int, int]

    def summed_over_tp(self, sequence: bool) -> tuple[int, int]:
        """The range of parameters whose replicas hold partial gradients; with `sequence` parallelism all replicas hold
        those of their tokens.
        """
        return self.replicated if sequence else self.tp_partial

    @property
    def padding(self) -> list[tuple[int, int]]:
        """The ranges (start, stop) after slots that belong to no parameter."""
        return [(slot.stop, end) for slot, end in self._slot_ends if slot.stop < end]

    def shard_range(self, index: int) -> tuple[int, int]:
        """The range of shard `index`."""
        size = self.numel // self.num_shards
        return index * size, (index + 1) * size

    def param_ranges(self, start: int, stop: int) -> list[tuple[Slot, int, int]]:
        """The parts (slot, start, stop) of the slots inside [start, stop)."""
        clipped = [(slot, max(slot.start, start), min(slot.stop, stop)) for slot in self.slots]
        return [part for part in clipped if part[1] < part[2]]

    def tensor_ranges(self, start: int, stop: int, topology: Topology) -> list[tuple[ParamSpec, TensorSpec, int, int]]:
        """The parts (parameter, tensor, start, stop) of the tensors inside [start, stop), such as q, k and v."""
        found = []
        for slot in self.slots:
            low = slot.start
            for tensor in slot.parameter.parts:
                high = low + math.prod(tensor.local_shape(topology))
                found.append((slot.parameter, tensor, max(low, start), min(high, stop)))
                low = high
        return [part for part in found if part[2] < part[3]]

    def merged_ranges(self, start: int, stop: int) -> list[tuple[Slot, int, int]]:
        """The ranges (first slot, start, stop) of parameters with equal optimizer flags inside [start, stop). A range
        includes the padding after its slots.
        """
        runs: list[tuple[Slot, int, int]] = []
        for slot, end in self._slot_ends:
            if runs and _optimizer_flags(runs[-1][0].parameter) == _optimizer_flags(slot.parameter):
                runs[-1] = (*runs[-1][:2], end)
            else:
                runs.append((slot, slot.start, end))
        clipped = [(slot, max(low, start), min(high, stop)) for slot, low, high in runs]
        return [run for run in clipped if run[1] < run[2]]

    @property
    def _slot_ends(self) -> Iterator[tuple[Slot, int]]:
        """Pairs of a slot and the start of its successor."""
        return zip(self.slots, [*(slot.start for slot in self.slots[1:]), self.numel], strict=True)


def pack(parameters: Sequence[ParamSpec], topology: Topology) -> BucketLayout:
    """Lay out parameters with common reduction axes: sharded over tp before replicated, matrices before vectors."""
    axes = parameters[0].reduce_axes
    assert all(p.reduce_axes == axes for p in parameters), "the gradients of a bucket have a common reduction group"
    shards = topology.size(*axes)
    slots: list[Slot] = []
    at = replicated_start = partial_stop = 0

    def order(parameter: ParamSpec) -> tuple[bool, ...]:
        return "tp" not in parameter.sharding, not parameter.tp_partial, *_optimizer_flags(parameter)

    for parameter in sorted(parameters, key=order):  # stable
        slots.append(Slot(parameter, at, at + parameter.local_numel(topology)))
        at = _align(slots[-1].stop, ALIGNMENT)
        if "tp" in parameter.sharding:
            replicated_start = at
        if parameter.tp_partial or "tp" in parameter.sharding:
            partial_stop = at
    numel, replicated = _align(at, ALIGNMENT * shards), (replicated_start, at)
    return BucketLayout(tuple(slots), numel, axes, shards, replicated, (replicated_start, partial_stop))


def _optimizer_flags(parameter: ParamSpec) -> tuple[bool, bool]:
    """The flags by which an optimizer treats parameters differently; matrices with weight decay sort first."""
    return not parameter.is_matrix, not parameter.weight_decay


def _align(value: int, unit: int) -> int:
    return math.ceil(value / unit) * unit
