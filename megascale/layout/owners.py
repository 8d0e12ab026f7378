"""Owners of whole matrices: the rank of a stage that updates a matrix whose shards are spread over tp and dp.

Storage and compute have layouts of their own. A matrix is stored as tp shards, each cut by ZeRO into flat ranges of the
bucket's shards. A rule of whole matrices runs on the owner: gradients go there, over dp and then over tp, and updates
come back the same way. Without ZeRO every dp replica is an owner, and so is every tp rank of a matrix that tp
replicates: replicas compute the same bits.

Owners are balanced by cost: from the most expensive matrix down, each goes to the rank that stores most of it, among
those whose work stays below their share, or have the least so far.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megascale.layout.buckets import BucketLayout, SlotRange
from megascale.layout.param_groups import ParamGroup, ParamGroups, group_ranges
from megascale.layout.tensors import TensorSpec
from megascale.layout.topology import Coord, Topology


@dataclass(frozen=True)
class OwnedMatrix:
    """A matrix of a bucket, and where it is updated.

    `range`: of each rank's shard of the matrix in the bucket, with padding. `tp_owner`, `dp_owner`: the owner's index
    in its tp group and among the ranks that shard the bucket; None if every index is an owner.
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
        return self.tensor.shape

    def local_shape(self, topology: Topology, tp: int) -> tuple[int, ...]:
        """Rows and columns of the shard of a tp rank, without padding rows, which come last."""
        return self.tensor.local_box(topology, Coord(tp=tp))[1]

    def stored(self, topology: Topology, tp: int) -> SlotRange:
        """The range of a tp rank's shard in the bucket, without padding rows."""
        return replace(self.range, stop=self.range.start + math.prod(self.local_shape(topology, tp)))


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
    axes = layouts[0].shard_axes.state if layouts else ()
    shards = topology.size(*axes)
    loads = dict.fromkeys(itertools.product(range(topology.tp), range(shards)), 0)
    found = [
        (bucket, group, item)
        for bucket, layout in enumerate(layouts)
        for group, item in group_ranges(layout, groups, topology)
        if group.needs_matrix
    ]
    costs = {(bucket, item.start): update_cost(group, item.tensor.shape) for bucket, group, item in found}
    share = SLACK * sum(costs.values()) / len(loads)
    placed: dict[tuple[int, int], OwnedMatrix] = {}
    for bucket, group, item in sorted(found, key=lambda found: -costs[found[0], found[2].start]):
        replicated, cost = "tp" not in item.tensor.sharding, costs[bucket, item.start]
        size = layouts[bucket].numel // shards
        ranks = [rank for rank in loads if not (replicated and rank[0])]
        least = min(loads[rank] for rank in ranks)
        free = [rank for rank in ranks if loads[rank] + cost <= share or loads[rank] == least]
        stored = [max(0, item.clipped(shard * size, (shard + 1) * size).numel) for shard in range(shards)]
        tp, dp = max(free, key=lambda rank: (stored[rank[1]], -loads[rank], -rank[1], -rank[0]))
        for rank in loads if replicated else [(tp, dp)]:
            loads[rank] += cost if rank[1] == dp else 0
        placed[bucket, item.start] = OwnedMatrix(item, group, None if replicated else tp, dp if axes else None)
    return [[placed[bucket, item.start] for b, _, item in found if b == bucket] for bucket in range(len(layouts))]
