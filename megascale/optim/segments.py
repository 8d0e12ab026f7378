"""Segments of a shard: the ranges of elements that belong to one parameter group, with equal flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megascale.layout.buckets import BucketLayout
from megascale.layout.owners import group_ranges
from megascale.layout.param_groups import ParamGroup, ParamGroups
from megascale.layout.topology import Topology
from megascale.ops.optimizer import Segment
from megascale.parallel.optimizer_shard import OptimizerShard, merge_ranges


class FlatRange(NamedTuple):
    """Elements [start, stop) of a bucket, of one group and with equal flags; padding after parameters included."""

    group: ParamGroup
    is_matrix: bool
    weight_decay: bool
    start: int
    stop: int


def flat_ranges(
    layout: BucketLayout, groups: ParamGroups, topology: Topology, shard: tuple[int, int]
) -> list[FlatRange]:
    """List the ranges inside a shard (start, stop) of groups that do not need whole matrices."""
    merged: list[FlatRange] = []
    for item in group_ranges(layout, groups, topology):
        flags = item.group, item.parameter.is_matrix, item.parameter.weight_decay
        if merged and merged[-1][:3] == flags and merged[-1].stop == item.start:
            merged[-1] = merged[-1]._replace(stop=item.stop)
        else:
            merged.append(FlatRange(*flags, item.start, item.stop))
    clipped = [r._replace(start=max(r.start, shard[0]), stop=min(r.stop, shard[1])) for r in merged]
    return [r for r in clipped if r.start < r.stop and not r.group.needs_matrix]


def state_ranges(ranges: Sequence[FlatRange]) -> dict[str, list[tuple[int, int]]]:
    """Return the ranges that have a state tensor, by its name."""
    names = dict.fromkeys(name for item in ranges for name in item.group.state)
    return {
        name: merge_ranges([(item.start, item.stop) for item in ranges if name in item.group.state]) for name in names
    }


def segments_of(shard: OptimizerShard, ranges: Sequence[FlatRange]) -> list[Segment]:
    """Return the segments of ranges of one group."""
    return [
        _segment(shard, item.start, item.stop, (item.is_matrix, item.weight_decay), tuple(item.group.state))
        for item in ranges
    ]


def tensor_segments(shard: OptimizerShard, topology: Topology) -> list[Segment]:
    """Return a segment for every tensor with elements in a shard, without padding after parameters."""
    return [
        _segment(shard, low, high, (parameter.is_matrix, parameter.weight_decay), tuple(shard.state))
        for parameter, _, low, high in shard.bucket.layout.tensor_ranges(*shard.bucket.shard, topology)
    ]


def _segment(shard: OptimizerShard, start: int, stop: int, flags: tuple[bool, bool], names: Sequence[str]) -> Segment:
    elements = slice(start - shard.bucket.shard[0], stop - shard.bucket.shard[0])
    state = {name: shard.state_of(name, start, stop) for name in names}
    residual = None if shard.residual is None else shard.residual[elements]
    return Segment(shard.master[elements], shard.bucket.grad[elements], state, *flags, residual=residual)
