"""Whole matrices of a pipeline stage: where they are, and what ranks send to their owners (`layout.owners`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from megascale.config.model import ModelConfig
from megascale.config.parallel import OverlapConfig, ParallelConfig
from megascale.config.train import OptimizerConfig, TrainConfig
from megascale.layout.buckets import BucketLayout, SlotRange, pack
from megascale.layout.chunks import chunk_buckets
from megascale.layout.owners import OwnedMatrix, assign_owners
from megascale.layout.param_groups import ParamGroup, ParamGroups, group_ranges
from megascale.layout.topology import Topology, topology_of


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
    """Return the axes over which the ranks at index `dp` of those that shard a bucket exchange its matrices: "dp",
    which stands for them, and "tp".
    """
    axes = ["dp"] if places and topology.size(*layout.shard_axes.state) > 1 else []
    crosses = any(place.tp_owner is not None and place.dp_owner in (None, dp) for place in places)
    return [*axes, "tp"] if topology.tp > 1 and crosses else axes


def sent_elements(
    places: Sequence[OwnedMatrix], layout: BucketLayout, topology: Topology, rank: tuple[int, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Count the elements that the rank at (tp, dp), as above, sends for a bucket by axis: to owners, and back."""
    tp, dp = rank
    there, back = {"dp": 0, "tp": 0}, {"dp": 0, "tp": 0}
    for place in places:
        stored = place.stored(topology, tp)
        if layout.shard_axes.state:
            here = max(0, stored.clipped(*layout.state_range(dp)).numel)
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
