"""Parameters side by side in one contiguous buffer.

A bucket is reduced, sharded over data parallelism and gathered as a whole: its shards are equal contiguous ranges, so
that a reduce-scatter and an all-gather are one collective without copies (MegaScale 3.2: a model chunk at a time).
Inside it parameters are grouped, so that what decays, and what every tp rank holds whole, are contiguous ranges as
well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megascale.layout.tensors import Parameter

ALIGNMENT = 64
"""Parameters and shards start at a multiple of this many numbers: 128 bytes or more in every format."""


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a bucket, in numbers."""

    parameter: Parameter
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Slots in order and the size of the buffer, a multiple of `shards`; all in numbers, not bytes.

    `whole`: the range of the parameters that every tp rank holds whole.
    """

    slots: tuple[Slot, ...]
    size: int
    shards: int
    whole: tuple[int, int]

    @property
    def padding(self) -> list[tuple[int, int]]:
        """(start, stop) of what lies behind slots and belongs to no parameter."""
        ends = [*(slot.start for slot in self.slots[1:]), self.size]
        return [(slot.stop, end) for slot, end in zip(self.slots, ends, strict=True) if slot.stop < end]

    def shard(self, index: int) -> tuple[int, int]:
        """The range of shard `index`."""
        each = self.size // self.shards
        return index * each, (index + 1) * each

    def parts(self, start: int, stop: int) -> list[tuple[Slot, int, int]]:
        """(slot, start, stop) of what of each slot lies inside [start, stop)."""
        inside = [(slot, max(slot.start, start), min(slot.stop, stop)) for slot in self.slots]
        return [part for part in inside if part[1] < part[2]]

    def runs(self, start: int, stop: int) -> list[tuple[int, int, bool]]:
        """(start, stop, decays) of the runs of equal weight decay inside [start, stop), padding with its run."""
        edges: list[tuple[int, int, bool]] = []
        for slot, following in zip(self.slots, [*self.slots[1:], None], strict=True):
            end = following.start if following else self.size
            if edges and edges[-1][2] == slot.parameter.decays:
                edges[-1] = (edges[-1][0], end, slot.parameter.decays)
            else:
                edges.append((slot.start, end, slot.parameter.decays))
        inside = [(max(low, start), min(high, stop), decays) for low, high, decays in edges]
        return [run for run in inside if run[0] < run[1]]


def pack(parameters: Sequence[Parameter], tp: int, shards: int) -> Bucket:
    """Lay parameters out: first those that tp cuts, then those that each rank holds whole; in each, matrices first."""

    def treatment(parameter: Parameter) -> tuple[bool, bool]:
        return parameter.split is None, not parameter.decays

    slots: list[Slot] = []
    at = whole_start = 0
    for parameter in sorted(parameters, key=treatment):  # stable: the network's order inside each group
        if parameter.split is not None:
            whole_start = _align(at + parameter.local_numel(tp), ALIGNMENT)
        slots.append(Slot(parameter, at, at + parameter.local_numel(tp)))
        at = _align(slots[-1].stop, ALIGNMENT)
    return Bucket(tuple(slots), _align(at, ALIGNMENT * shards), shards, (whole_start, at))


def _align(value: int, unit: int) -> int:
    return math.ceil(value / unit) * unit
