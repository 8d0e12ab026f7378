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
from dataclasses import dataclass
from functools import lru_cache

from megascale.config.run import RunConfig
from megascale.layout.buckets import BucketLayout, pack
from megascale.layout.chunks import chunk_buckets
from megascale.layout.param_groups import ParamGroup, ParamGroups
from megascale.layout.tensors import ParamSpec, TensorSpec
from megascale.layout.topology import DATA_AXES, Coord, Topology, topology_of


@dataclass(frozen=True)
class GroupRange:
    """The range [start, stop) of a tensor in its bucket, on any rank; with the padding after it, if it is the last of
    its parameter.
    """

    parameter: ParamSpec
    tensor: TensorSpec
    group: ParamGroup
    start: int
    stop: int


@dataclass(frozen=True)
class MatrixShard:
    """A matrix of a bucket, and where it is updated.

    `tp_owner`, `dp_owner`: the owner's index in its tp and its data-parallel group; None if every index is an owner.
    `start`: of each rank's shard of the matrix in its buffer. `weight_decay`: decay applies.
    """

    tensor: TensorSpec
    group: ParamGroup
    start: int
    weight_decay: bool
    tp_owner: int | None
    dp_owner: int | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix."""
        rows, columns = self.tensor.shape
        return rows, columns

    def local_shape(self, topology: Topology, tp: int) -> tuple[int, int]:
        """Rows and columns of the shard of a tp rank, without padding rows, which come last."""
        rows, columns = self.tensor.local_box(topology, Coord(tp=tp))[1]
        return rows, columns

    def stored(self, topology: Topology, tp: int) -> tuple[int, int]:
        """The range of a tp rank's shard in the bucket."""
        return self.start, self.start + math.prod(self.local_shape(topology, tp))


def group_ranges(layout: BucketLayout, groups: ParamGroups, topology: Topology) -> list[GroupRange]:
    """List the tensors of a bucket in order, with their groups and ranges."""
    found = layout.tensor_ranges(0, layout.numel, topology)
    stops = [*(start for _, _, start, _ in found[1:]), layout.numel]
    return [
        GroupRange(parameter, tensor, groups.group_of(parameter, tensor), start, stop)
        for (parameter, tensor, start, _), stop in zip(found, stops, strict=True)
    ]


SLACK = 1.02
"""Most work of an owner that is chosen for what it stores, relative to an even share."""

ELEMENTWISE = 16
"""Multiplications of an element outside of GEMMs."""


def update_cost(group: ParamGroup, shape: tuple[int, int]) -> int:
    """Count the multiplications of a matrix's update in a mean step: of its GEMMs, of decompositions, and several an
    element.
    """
    gemms = sum(count * math.prod(sizes) for count, sizes in group.gemms(shape))
    return int(gemms) + ELEMENTWISE * math.prod(shape)


def assign_owners(
    layouts: Sequence[BucketLayout], groups: ParamGroups, topology: Topology, zero: int
) -> list[list[MatrixShard]]:
    """Assign the matrices of a stage's buckets to owners; by bucket, in the order of the buffer."""
    shards = topology.size(*DATA_AXES) if zero else 1
    loads = dict.fromkeys(itertools.product(range(topology.tp), range(shards)), 0)
    found = [
        (bucket, item)
        for bucket, layout in enumerate(layouts)
        for item in group_ranges(layout, groups, topology)
        if item.group.needs_matrix
    ]
    costs = {(bucket, item.start): update_cost(item.group, _shape(item.tensor)) for bucket, item in found}
    share = SLACK * sum(costs.values()) / len(loads)
    placed: dict[tuple[int, int], MatrixShard] = {}
    for bucket, item in sorted(found, key=lambda pair: -costs[pair[0], pair[1].start]):
        replicated, cost = "tp" not in item.tensor.sharding, costs[bucket, item.start]
        size = layouts[bucket].numel // shards
        ranks = [rank for rank in loads if not (replicated and rank[0])]
        least = min(loads[rank] for rank in ranks)
        free = [rank for rank in ranks if loads[rank] + cost <= share or loads[rank] == least]
        tp, dp = max(free, key=lambda rank: (_overlap(item, rank[1], size), -loads[rank], -rank[1], -rank[0]))
        for rank in loads if replicated else [(tp, dp)]:
            loads[rank] += cost if rank[1] == dp else 0
        owner = None if replicated else tp, dp if zero else None
        placed[bucket, item.start] = MatrixShard(
            item.tensor, item.group, item.start, item.parameter.weight_decay, *owner
        )
    return [[placed[bucket, item.start] for b, item in found if b == bucket] for bucket in range(len(layouts))]


def _shape(tensor: TensorSpec) -> tuple[int, int]:
    rows, columns = tensor.shape
    return rows, columns


def _overlap(item: GroupRange, shard: int, size: int) -> int:
    """Count the elements of a tensor in a shard of `size` elements."""
    return max(0, min(item.stop, (shard + 1) * size) - max(item.start, shard * size))


@dataclass(frozen=True)
class StageMatrices:
    """The buckets of a pipeline rank, and the places of their matrices."""

    layouts: tuple[BucketLayout, ...]
    places: tuple[tuple[MatrixShard, ...], ...]
    ranges: tuple[tuple[GroupRange, ...], ...]


class _CacheKey:
    """A configuration as a key of a cache: sections are frozen, and hold lists."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._key = config.model_dump_json(include={"model", "parallel", "overlap", "optimizer", "train"})

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CacheKey) and other._key == self._key


def stage_places(config: RunConfig, pp_rank: int) -> StageMatrices:
    """Return the buckets of a pipeline rank and the places of their matrices, for a resolved configuration."""
    return _stage_places(_CacheKey(config), pp_rank)


@lru_cache(64)
def _stage_places(key: _CacheKey, pp_rank: int) -> StageMatrices:
    config, topology, groups = key.config, topology_of(key.config), ParamGroups(key.config.optimizer)
    layouts = [pack(bucket, topology) for chunk in chunk_buckets(config, pp_rank) for bucket in chunk]
    places = assign_owners(layouts, groups, topology, config.parallel.zero)
    ranges = (tuple(group_ranges(layout, groups, topology)) for layout in layouts)
    return StageMatrices(tuple(layouts), tuple(map(tuple, places)), tuple(ranges))


def exchange_axes(places: Sequence[MatrixShard], topology: Topology, zero: int, dp: int) -> list[str]:
    """Return the axes over which the ranks at data-parallel index `dp` exchange the matrices of a bucket."""
    axes = ["dp"] if places and zero and topology.size(*DATA_AXES) > 1 else []
    crosses = any(place.tp_owner is not None and place.dp_owner in (None, dp) for place in places)
    return [*axes, "tp"] if topology.tp > 1 and crosses else axes


def sent_elements(
    places: Sequence[MatrixShard], layout: BucketLayout, topology: Topology, zero: int, rank: tuple[int, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Count the elements that the rank at (tp, dp) sends for a bucket by axis: there, to owners, and back."""
    tp, dp = rank
    there, back = {"dp": 0, "tp": 0}, {"dp": 0, "tp": 0}
    for place in places:
        low, high = place.stored(topology, tp)
        if zero:
            start, stop = layout.shard_range(dp)
            here = max(0, min(high, stop) - max(low, start))
            if place.dp_owner == dp:
                back["dp"] += high - low - here
            else:
                there["dp"] += here
        if place.tp_owner is not None and place.dp_owner in (None, dp):
            if place.tp_owner == tp:
                back["tp"] += math.prod(place.shape) - (high - low)
            else:
                there["tp"] += high - low
    return there, back
