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
from dataclasses import dataclass, field, replace
from functools import lru_cache

from megascale.config.model import ModelConfig
from megascale.config.parallel import OverlapConfig, ParallelConfig
from megascale.config.train import OptimizerConfig, TrainConfig
from megascale.layout.buckets import BucketLayout, SlotRange, pack
from megascale.layout.chunks import chunk_buckets
from megascale.layout.param_groups import ParamGroup, ParamGroups, group_ranges
from megascale.layout.tensors import TensorSpec
from megascale.layout.topology import Coord, Topology, topology_of


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


SLACK = 1.02
"""Most work of an owner that is chosen for what it stores, relative to an even share."""

ELEMENTWISE = 16
"""Multiplications of an element outside of GEMMs."""


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


@dataclass(frozen=True)
class StageMatrices:
    """The buckets of a pipeline rank, with the owners of their matrices, and the groups and ranges of their tensors."""

    layouts: tuple[BucketLayout, ...]
    places: tuple[tuple[OwnedMatrix, ...], ...]
    ranges: tuple[tuple[tuple[ParamGroup, SlotRange], ...], ...]


@dataclass(frozen=True)
class _Job:
    """The sections that decide a stage's matrices. `text`: all of them, since sections with lists have no hash."""

    text: tuple[str, ...]
    sections: tuple[ModelConfig, ParallelConfig, OverlapConfig, TrainConfig, OptimizerConfig] = field(compare=False)


def stage_places(
    model: ModelConfig, parallel: ParallelConfig, overlap: OverlapConfig, train: TrainConfig,
    optimizer: OptimizerConfig, pp_rank: int,
) -> StageMatrices:  # fmt: skip
    """Return the buckets of a pipeline rank and the places of their matrices, for a resolved configuration."""
    sections = model, parallel, overlap, train, optimizer
    return _stage_places(_Job(tuple(section.model_dump_json() for section in sections), sections), pp_rank)


@lru_cache(64)
def _stage_places(job: _Job, pp_rank: int) -> StageMatrices:
    model, parallel, overlap, train, optimizer = job.sections
    topology, groups = topology_of(parallel), ParamGroups(optimizer)
    chunks = chunk_buckets(model, parallel, overlap, train, pp_rank)
    layouts = [pack(bucket, topology, parallel.zero) for chunk in chunks for bucket in chunk]
    places = assign_owners(layouts, groups, topology)
    ranges = (tuple(group_ranges(layout, groups, topology)) for layout in layouts)
    return StageMatrices(tuple(layouts), tuple(map(tuple, places)), tuple(ranges))


def exchange_axes(places: Sequence[OwnedMatrix], layout: BucketLayout, topology: Topology, dp: int) -> list[str]:
    """Return the axes over which the ranks at data-parallel index `dp` exchange the matrices of a bucket."""
    axes = ["dp"] if places and topology.size(*layout.shard_axes.state) > 1 else []
    crosses = any(place.tp_owner is not None and place.dp_owner in (None, dp) for place in places)
    return [*axes, "tp"] if topology.tp > 1 and crosses else axes


def sent_elements(
    places: Sequence[OwnedMatrix], layout: BucketLayout, topology: Topology, rank: tuple[int, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Count the elements that the rank at (tp, dp) sends for a bucket by axis: there, to owners, and back."""
    tp, dp = rank
    there, back = {"dp": 0, "tp": 0}, {"dp": 0, "tp": 0}
    for place in places:
        stored = place.stored(topology, tp)
        if layout.shard_axes.state:
            here = max(0, stored.clipped(*layout.shard_range(dp)).numel)
            if place.dp_owner == dp:
                back["dp"] += stored.numel - here
            else:
                there["dp"] += here
        if place.tp_owner is not None and place.dp_owner in (None, dp):
            if place.tp_owner == tp:
                back["tp"] += math.prod(place.shape) - stored.numel
            else:
                there["tp"] += stored.numel
    return there, back
