"""Bytes of optimizer state on a rank, and the work of whole matrices on their owners.

Element-wise state lies where ZeRO stores the elements, state of whole matrices on their owners (`layout.owners`). The
rank with most of both is counted.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from megascale.catalog.optimizers import ALL_KINDS
from megascale.config.run import RunConfig
from megascale.config.train import OptimizerConfig
from megascale.layout.chunks import bucket_sizes, stage_elements
from megascale.layout.owners import OwnedMatrix, update_cost
from megascale.layout.param_groups import ParamGroup, ParamGroups
from megascale.layout.topology import STAGE_AXES, Coord, inner_axes, topology_of
from megascale.plan.account.stage_matrices import StageMatrices, stage_places

Axes = tuple[str, ...]

Owner = tuple[Axes, int | None, int | None]
"""The owner of matrices of buckets with these reduction axes: `tp_owner` and `dp_owner` of an `OwnedMatrix`."""


@dataclass(frozen=True)
class StageOptimizer:
    """The optimizer on the ranks of a pipeline stage, of a resolved configuration."""

    config: RunConfig
    stage: int

    @cached_property
    def _matrices(self) -> StageMatrices:
        c = self.config
        return stage_places(c.model, c.parallel, c.overlap, c.train, c.optimizer, self.stage)

    @cached_property
    def _owned(self) -> Mapping[Owner, list[OwnedMatrix]]:
        """The matrices of all buckets that are updated as a whole, by owner."""
        found = defaultdict[Owner, list[OwnedMatrix]](list)
        if not is_mixed(self.config.optimizer):
            return found
        for layout, places in zip(self._matrices.layouts, self._matrices.places, strict=True):
            for place in places:
                found[layout.reduce_axes, place.tp_owner, place.dp_owner].append(place)
        return found

    def _places(self, coord: Coord) -> Iterator[tuple[Axes, int, list[Owner]]]:
        """Yield the place of a rank of the stage in the buckets of each kind: reduction axes, the number of its shard
        of the state, and the owners that it is.
        """
        for axes, layout in {layout.reduce_axes: layout for layout in self._matrices.layouts}.items():
            index = topology_of(self.config.parallel).index_in_group(coord, *(layout.shard_axes.state or axes))
            owners = [(axes, tp, shard) for tp in (None, coord.tp) for shard in (None, index)]
            yield axes, layout.state_shard(index), [owner for owner in owners if owner in self._owned]

    @property
    def _coords(self) -> Iterator[Coord]:
        topology = topology_of(self.config.parallel)
        return map(topology.coord, range(topology.size(*STAGE_AXES)))

    def state_bytes(self, zero: int) -> int:
        """Count the bytes of optimizer state on the fullest rank, without master weights. `zero`: the stage of ZeRO,
        which may be another system's.
        """
        c, p, (_, wide) = self.config, self.config.parallel, self.config.train.element_bytes
        if not is_mixed(c.optimizer):
            chunks = bucket_sizes(c.model, p, c.overlap, c.train, self.stage)
            elements, _, shard = stage_elements(chunks, topology_of(p), trained=True)
            return wide * len(ParamGroups(c.optimizer).default.state) * (shard if zero else elements)
        flat = self._flat_elements(bool(zero))
        owned = {
            owner: sum(place.group.state_bytes(place.shape, wide) for place in places)
            for owner, places in self._owned.items()
        }
        return max(
            sum(
                wide * flat[axes, index if zero else 0] + sum(owned[owner] for owner in owners)
                for axes, index, owners in self._places(coord)
            )
            for coord in self._coords
        )

    def _flat_elements(self, sharded: bool) -> Counter[tuple[Axes, int]]:
        """Count elements of element-wise state by reduction axes and shard; shard 0 is all without ZeRO."""
        found = Counter[tuple[Axes, int]]()
        for layout, ranges in zip(self._matrices.layouts, self._matrices.ranges, strict=True):
            size = layout.numel // layout.state_shards if sharded else layout.numel
            for group, item in ranges:
                tensors = 0 if group.needs_matrix else len(group.state)
                for shard in range(item.start // size, (item.stop - 1) // size + 1) if tensors else ():
                    elements = min(item.stop, (shard + 1) * size) - max(item.start, shard * size)
                    found[layout.reduce_axes, shard] += tensors * elements
        return found

    def update_bytes(self) -> int:
        """Estimate the bytes of temporary tensors of an update of whole matrices, on an average rank: messages of
        gradients (and weights) in the beginning or directions in the end, and the work on one matrix.
        """
        p, (_, wide) = self.config.parallel, self.config.train.element_bytes
        topology, sent, directions, work = topology_of(p), 0.0, 0.0, 0
        for (axes, tp_owner, _), places in self._owned.items():
            sharing = axes if topology.state_over_all else inner_axes(axes)
            tp, shards = 1 if tp_owner is None else p.tp, topology.size(*sharing) if p.zero else 1
            size = sum(math.prod(place.shape) for place in places)
            weights = sum(math.prod(place.shape) for place in places if place.group.facts["weight"])
            sent += (2 * size + weights) / (tp * shards) * (1 - 1 / shards)
            directions += size / (tp * shards) * (2 - 1 / tp) if tp * shards > 1 else 0
            work = max(work, *(place.group.facts["temporaries"] * math.prod(place.shape) for place in places))
        return int(wide * (max(sent, directions) + work))

    def fullest_owner(self) -> list[tuple[ParamGroup, tuple[int, ...]]]:
        """List the matrices of the owner with most work, by group and shape."""
        if not self._owned:
            return []
        work = {
            owner: sum(update_cost(place.group, place.shape) for place in places)
            for owner, places in self._owned.items()
        }
        by_rank = [[owner for *_, owners in self._places(coord) for owner in owners] for coord in self._coords]
        fullest = max(by_rank, key=lambda owners: sum(work[owner] for owner in owners))
        return [(place.group, place.shape) for owner in fullest for place in self._owned[owner]]


def is_mixed(optimizer: OptimizerConfig) -> bool:
    """Return True if parameters have different state: several groups, or a rule of whole matrices."""
    default = ParamGroups(optimizer).default
    return bool(optimizer.groups) or default.needs_matrix or set(default.facts["kinds"]) != set(ALL_KINDS)
