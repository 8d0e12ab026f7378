"""Ranks and their coordinates. tp varies fastest, then cp, dp, and pp slowest.

Tensor parallelism so stays inside a node, and data-parallel groups are placed before pipeline stages, as in section 2
of the paper.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from megascale.config.run import RunConfig

AXES = ("tp", "cp", "dp", "pp")
"""Axes of parallelism, the fastest first."""

DATA = ("cp", "dp")
"""Axes whose ranks hold the same weights and train on different tokens: gradients are summed over them."""

AT_ONCE = 8
"""Ranks of a job up to which what all of it sums is one collective. Larger jobs sum over one axis after the other, so
that no communicator has more ranks than an axis.
"""


class Coord(NamedTuple):
    """A rank's index on each axis."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0


@dataclass(frozen=True)
class Topology:
    """The sizes of the axes; everything else is arithmetic, for worlds of any size."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.size(*AXES)

    def size(self, *axes: str) -> int:
        """Number of ranks of a group along `axes`."""
        return math.prod(getattr(self, axis) for axis in axes)

    def index(self, coord: Coord, *axes: str) -> int:
        """Place of `coord` in its group along `axes`, whose ranks ascend: the order of AXES counts, not theirs."""
        index = 0
        for axis in reversed(AXES):
            if axis in axes:
                index = index * getattr(self, axis) + getattr(coord, axis)
        return index

    def coord(self, rank: int) -> Coord:
        """Where `rank` stands.

        Raises: IndexError outside the world.
        """
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} is not in a world of {self.world}")
        indices = []
        for axis in AXES:
            rank, index = divmod(rank, getattr(self, axis))
            indices.append(index)
        return Coord(*indices)

    def rank(self, coord: Coord) -> int:
        """The rank that stands at `coord`."""
        return self.index(coord, *AXES)

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from `rank` on `axes` only, itself among them, in ascending order."""
        coord = self.coord(rank)
        ranges = [range(getattr(self, axis)) for axis in axes]
        members = (coord._replace(**dict(zip(axes, indices, strict=True))) for indices in itertools.product(*ranges))
        return sorted(self.rank(member) for member in members)

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups along `axes`; each rank is in exactly one."""
        first = (rank for rank in range(self.world) if all(getattr(self.coord(rank), axis) == 0 for axis in axes))
        return [self.group(rank, *axes) for rank in first]


def topology_of(config: RunConfig) -> Topology:
    """The topology of a resolved configuration."""
    p = config.parallel
    return Topology(tp=p.tp, cp=p.cp, dp=config.dp, pp=p.pp)
