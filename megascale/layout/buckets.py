"""Parameters side by side in one contiguous buffer.

A bucket is reduced, sharded over data parallelism and gathered as a whole: its shards are equal contiguous ranges, so
that a reduce-scatter and an all-gather are one collective without copies (MegaScale 3.2: a model chunk at a time).
Inside it parameters are grouped, so that those treated alike, and those that every tp rank holds whole, are contiguous
ranges as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megascale.layout.tensors import Parameter
from megascale.layout.topology import Topology

ALIGNMENT = 64
"""Parameters and shards start at a multiple of this many elements: 128 bytes or more in every dtype."""


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a bucket, in elements."""

    parameter: Parameter
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Slots in order and the size of the buffer, a multiple of `shards`; all in elements, not bytes.

    `axes`: the axes of parallelism that reduce and shard it; `shards`: the ranks of such a group. `whole`: the range of
    the parameters that every tp rank holds whole.
    """

    slots: tuple[Slot, ...]
    size: int
    axes: tuple[str, ...]
    shards: int
    whole: tuple[int, int]

    @property
    def padding(self) -> list[tuple[int, int]]:
        """(start, stop) of what lies behind slots and belongs to no parameter."""
        return [(slot.stop, end) for slot, end in self._ends if slot.stop < end]

    def shard(self, index: int) -> tuple[int, int]:
        """The range of shard `index`."""
        each = self.size // self.shards
        return index * each, (index + 1) * each

    def parts(self, start: int, stop: int) -> list[tuple[Slot, int, int]]:
        """(slot, start, stop) of what of each slot lies inside [start, stop)."""
        inside = [(slot, max(slot.start, start), min(slot.stop, stop)) for slot in self.slots]
        return [part for part in inside if part[1] < part[2]]

    def runs(self, start: int, stop: int) -> list[tuple[Slot, int, int]]:
        """(slot, start, stop) of the runs of parameters treated alike inside [start, stop), padding with its run; each
        run goes by its first slot.
        """
        runs: list[tuple[Slot, int, int]] = []
        for slot, end in self._ends:
            if runs and _treatment(runs[-1][0].parameter) == _treatment(slot.parameter):
                runs[-1] = (*runs[-1][:2], end)
            else:
                runs.append((slot, slot.start, end))
        inside = [(slot, max(low, start), min(high, stop)) for slot, low, high in runs]
        return [run for run in inside if run[1] < run[2]]

    @property
    def _ends(self) -> Iterator[tuple[Slot, int]]:
        """Each slot, and where the next one starts."""
        return zip(self.slots, [*(slot.start for slot in self.slots[1:]), self.size], strict=True)


def pack(parameters: Sequence[Parameter], topology: Topology) -> Bucket:
    """Lay parameters out: first those that tp shards, then those that each rank holds whole; in each, matrices first.
    The gradients of all are reduced over the same axes.
    """
    axes = parameters[0].reduce_axes
    assert all(p.reduce_axes == axes for p in parameters), "one group reduces a bucket"
    shards = topology.size(*axes)
    slots: list[Slot] = []
    at = whole_start = 0
    for parameter in sorted(parameters, key=lambda p: ("tp" not in p.sharding, *_treatment(p))):  # stable
        slots.append(Slot(parameter, at, at + parameter.local_numel(topology)))
        at = _align(slots[-1].stop, ALIGNMENT)
        if "tp" in parameter.sharding:
            whole_start = at
    return Bucket(tuple(slots), _align(at, ALIGNMENT * shards), axes, shards, (whole_start, at))


def _treatment(parameter: Parameter) -> tuple[bool, bool]:
    """The flags by which an optimizer tells parameters apart."""
    return not parameter.is_matrix, not parameter.weight_decay


def _align(value: int, unit: int) -> int:
    return math.ceil(value / unit) * unit
