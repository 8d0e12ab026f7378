"""The topology of a job: ranks and their coordinates on the axes of parallelism.

    rank = tp + TP * (cp + CP * (dp + DP * pp))

tp varies fastest and stays inside a node; pp varies slowest, after the data-parallel groups, as in section 2 of the
paper. Experts fold over the ranks of a pipeline stage, of which rank i, counted along tp, cp and dp, holds the experts
of index `i mod ep`, and shares them with the ranks of its `edp` group (Liu et al. 2025, arXiv 2504.14960).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from megascale.config.parallel import ParallelConfig

AXES = ("tp", "cp", "dp", "pp")  # axes of parallelism, fastest first

STAGE_AXES = ("tp", "cp", "dp")
"""Axes along which the ranks of a pipeline stage are counted, fastest first."""

EXPERT_AXES = ("ep", "edp")
"""Axes of a stage's ranks for experts: ranks along ep hold different experts, ranks along edp the same ones."""

DATA_AXES = ("cp", "dp")
"""Axes whose ranks hold the same weights and train on different tokens: gradients are reduced over these axes."""

INNER_AXES = {"dp": "dp_shard", "edp": "edp_shard"}
"""By axis, that of the neighbours along it that shard among each other."""

REPLICATE = "dp_replicate"
"""The axis of the ranks that hold the same shards: of dp and of edp, since a stage's inner ranks are consecutive."""

MAX_FLAT_REDUCE_RANKS = 8
"""Maximum ranks of a job with a single all-reduce over the world. Larger jobs reduce axis by axis, and have no
communicator larger than an axis.
"""


class Coord(NamedTuple):
    """The coordinates of a rank: its index on every axis."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0


@dataclass(frozen=True)
class Topology:
    """The sizes of the axes. All methods are arithmetic on these sizes, for worlds of any size. `cp_heads`: that many
    neighbours along cp exchange heads of attention; cp / cp_heads ranks exchange keys and values, or with `pooled` all
    cp x dp ranks. `ep` divides the ranks of a stage.

    `dp_replicate`: groups of dp / dp_replicate neighbours that shard among each other (hybrid sharding); `ep` divides a
    stage's ranks of such a group. `state_over_all`: groups with copies of sharded weights shard their state.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    cp_heads: int = 1
    pooled: bool = False
    ep: int = 1
    dp_replicate: int = 1
    state_over_all: bool = False

    @property
    def edp(self) -> int:
        return self.size(*STAGE_AXES) // self.ep

    @property
    def dp_shard(self) -> int:
        return self.dp // self.dp_replicate

    @property
    def edp_shard(self) -> int:
        return self.edp // self.dp_replicate

    @property
    def world_size(self) -> int:
        return self.size(*AXES)

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    def size(self, *axes: str) -> int:
        """Number of ranks of a group along `axes`."""
        return math.prod(getattr(self, axis) for axis in axes)

    def index_in_group(self, coord: Coord, *axes: str) -> int:
        """Index of `coord` in its group along `axes`: of AXES, with a part of dp in its place, or one of experts. Ranks
        of a group ascend; the order of `axes` does not matter.
        """
        if axes and axes[0] in ("ep", "edp", "edp_shard"):
            edp, ep = divmod(self.index_in_group(coord, *STAGE_AXES), self.ep)
            return edp % self.edp_shard if axes == ("edp_shard",) else ep if axes == ("ep",) else edp
        index, (copy, inner) = 0, divmod(coord.dp, self.dp_shard)
        places = {"pp": coord.pp, REPLICATE: copy, "dp": coord.dp, "dp_shard": inner, "cp": coord.cp, "tp": coord.tp}
        for axis in (axis for axis in places if axis in axes):
            index = index * getattr(self, axis) + places[axis]
        return index

    def coord(self, rank: int) -> Coord:
        """The coordinates of `rank`.

        Raises: IndexError for a rank outside the world
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in a world of {self.world_size}")
        indices = []
        for axis in AXES:
            rank, index = divmod(rank, getattr(self, axis))
            indices.append(index)
        return Coord(*indices)

    def rank(self, coord: Coord) -> int:
        return coord.tp + self.tp * (coord.cp + self.cp * (coord.dp + self.dp * coord.pp))

    def group(self, rank: int, *axes: str) -> list[int]:
        """The group of `rank` along `axes`, those of `index_in_group`: all ranks with its coordinates on other axes,
        in ascending order.
        """
        coord = self.coord(rank)
        if axes and axes[0] in ("ep", "edp", "edp_shard"):
            stage, (edp, ep) = self.group(rank, *STAGE_AXES), divmod(self.index_in_group(coord, *STAGE_AXES), self.ep)
            if axes == ("ep",):
                return stage[edp * self.ep : (edp + 1) * self.ep]
            along_edp, first = stage[ep :: self.ep], edp - edp % self.edp_shard
            return along_edp if axes == ("edp",) else along_edp[first : first + self.edp_shard]
        first = coord.dp - coord.dp % self.dp_shard
        parts = {
            "dp_shard": range(first, first + self.dp_shard),
            REPLICATE: range(coord.dp - first, self.dp, self.dp_shard),
        }
        ranges = [parts.get(axis, range(self.size(axis))) for axis in axes]
        places = ["dp" if axis in parts else axis for axis in axes]
        members = (coord._replace(**dict(zip(places, indices, strict=True))) for indices in itertools.product(*ranges))
        return sorted(self.rank(member) for member in members)

    def cp_groups(self, rank: int) -> tuple[list[int], list[int]]:
        """The ranks that exchange heads of attention with `rank`, and those that exchange keys and values with it."""
        if self.pooled:
            return [rank], self.group(rank, *DATA_AXES)
        group, index, heads = self.group(rank, "cp"), self.coord(rank).cp, self.cp_heads
        first = index - index % heads
        return group[first : first + heads], group[index % heads :: heads]

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups along `axes`, a partition of the world."""
        first = (rank for rank in range(self.world_size) if all(getattr(self.coord(rank), axis) == 0 for axis in axes))
        return [self.group(rank, *axes) for rank in first]


def inner_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of the neighbours that shard among each other, of ranks along `axes` that reduce gradients."""
    return tuple(INNER_AXES.get(axis, axis) for axis in axes)


def topology_of(p: ParallelConfig) -> Topology:
    """The topology of a resolved configuration."""
    return Topology(
        tp=p.tp, cp=p.cp, dp=p.replicas, pp=p.pp, cp_heads=p.cp_heads, pooled=p.hybrid_dp, ep=p.ep,
        dp_replicate=p.replicas // (p.dp_shard or p.replicas), state_over_all=p.state_shard == "all",
    )  # fmt: skip
