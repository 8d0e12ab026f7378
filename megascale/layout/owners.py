"""Owners of whole matrices: the rank of a stage that updates a matrix whose shards are spread over tp and dp.

Storage and compute have layouts of their own. A matrix is stored as tp shards, each cut by ZeRO into flat ranges of the
bucket's shards. A rule of whole matrices runs on the owner: gradients go there, over dp and then over tp, and updates
come back the same way. Without ZeRO every dp replica is an owner, and so is every tp rank of a matrix that tp
replicates: replicas compute the same bits. The matrices of a stack of experts are owned one by one; ranks along ep hold
different ones, and ZeRO cuts them over edp in place of dp.

Owners are balanced by cost: from the most expensive matrix down, each goes to the rank that stores most of it, among
those whose work stays below their share, or have the least so far.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megascale.layout.buckets import BucketLayout, SlotRange
from megascale.layout.param_groups import ParamGroup, ParamGroups, group_ranges
from megascale.layout.tensors import TensorSpec
from megascale.layout.topology import STAGE_AXES, Coord, Topology


@dataclass(frozen=True)
class OwnedMatrix:
    """A matrix of a bucket, and where it is updated.

    `range`: of each rank's shard of the matrix in the bucket, with padding; ranks along ep have different matrices of a
    stack there. `tp_owner`, `dp_owner`: the owner's index in its tp group and among the ranks that shard the bucket;
    None if every index is an owner.
    """

    range: SlotRange
    group: ParamGroup
    tp_owner: int | None
    dp_owner: int | None

    @property
    def tensor(self) -> TensorSpec:
        return self.range.tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape[-2:]

    def index(self, topology: Topology, coord: Coord) -> tuple[int, ...]:
        """The global index in its stack of the matrix of the rank at `coord`; () of a matrix by itself."""
        offset, size = self.tensor.local_box(topology, coord)
        found, rest = list[int](), self.range.matrix
        for first, count in zip(offset[-3::-1], size[-3::-1], strict=True):  # the last dimension varies fastest
            rest, at = divmod(rest, count)
            found.insert(0, first + at)
        return tuple(found)

    def name(self, topology: Topology, coord: Coord) -> str:
        """The global name, with the index in a stack: layers.0.experts.down.weight[3]."""
        index = self.index(topology, coord)
        return f"{self.tensor.name}{list(index) if index else ''}"

    def local_shape(self, topology: Topology, tp: int) -> tuple[int, ...]:
        """Rows and columns of the shard of a tp rank, without padding rows, which come last."""
        return self.tensor.local_box(topology, Coord(tp=tp))[1][-2:]

    def stored(self, topology: Topology, tp: int) -> SlotRange:
        """The range of a tp rank's shard in the bucket, without padding rows."""
        return replace(self.range, stop=self.range.start + math.prod(self.local_shape(topology, tp)))


Owner = tuple[int | None, int | None]
"""`tp_owner` and `dp_owner` of an `OwnedMatrix`."""

SLACK = 1.02  # most work of an owner that is chosen for what it stores, relative to an even share
ELEMENTWISE = 16  # multiplications of an element outside of GEMMs


def update_cost(group: ParamGroup, shape: tuple[int, ...]) -> int:
    """Count the multiplications of a matrix's update in a mean step: of its GEMMs, of decompositions, and several an
    element.
    """
    gemms = sum(count * math.prod(sizes) for count, sizes in group.gemms(shape))
    return int(gemms) + ELEMENTWISE * math.prod(shape)


def assign_owners(layouts: Sequence[BucketLayout], groups: ParamGroups, topology: Topology) -> list[list[OwnedMatrix]]:
    """Assign the matrices of a stage's buckets to owners; by bucket, in the order of the buffer."""
    found = [
        (bucket, group, item, _owner_ranks(topology, layout.shard_axes.state, "tp" in item.tensor.sharding))
        for bucket, layout in enumerate(layouts)
        for group, item in group_ranges(layout, groups, topology)
        if group.needs_matrix
    ]
    costs = {(bucket, item.start): update_cost(group, item.tensor.shape[-2:]) for bucket, group, item, _ in found}
    share = SLACK * sum(costs[bucket, item.start] / len(ranks) for bucket, _, item, ranks in found)
    loads = [0] * topology.size(*STAGE_AXES)
    placed = defaultdict[int, dict[int, OwnedMatrix]](dict)
    for bucket, group, item, ranks in sorted(found, key=lambda found: -costs[found[0], found[2].start]):
        cost, stored = costs[bucket, item.start], _stored_by_shard(layouts[bucket], item)
        load = {owner: max(loads[rank] for rank in ranks[owner]) for owner in ranks}
        least = min(load.values())
        preference = {
            (tp, dp): (stored[dp or 0], -load[tp, dp], -(dp or 0), -(tp or 0))
            for tp, dp in ranks
            if load[tp, dp] + cost <= share or load[tp, dp] == least
        }
        tp, dp = owner = max(preference, key=lambda owner: preference[owner])
        for rank in ranks[owner]:
            loads[rank] += cost
        placed[bucket][item.start] = OwnedMatrix(item, group, tp, dp)
    return [[placed[bucket][start] for start in sorted(placed[bucket])] for bucket in range(len(layouts))]


@lru_cache(16)
def _owner_ranks(topology: Topology, shard_axes: tuple[str, ...], by_tp: bool) -> Mapping[Owner, list[int]]:
    """Map the owners that a matrix may have to the ranks of the stage that then update it, or their own matrix at its
    place. `shard_axes`: whose ranks shard the bucket; `by_tp`: tp shards the matrix.
    """
    ranks = defaultdict[Owner, list[int]](list)
    for rank in range(topology.size(*STAGE_AXES)):
        coord = topology.coord(rank)
        dp = topology.index_in_group(coord, *shard_axes) if shard_axes else None
        ranks[coord.tp if by_tp else None, dp].append(rank)
    return ranks


def _stored_by_shard(layout: BucketLayout, item: SlotRange) -> list[int]:
    """Count the elements of a range in each shard of the bucket, in the only one if it is not sharded."""
    shards = range(layout.state_shards if layout.shard_axes.state else 1)
    return [max(0, item.clipped(*layout.state_range(shard)).numel) for shard in shards]
