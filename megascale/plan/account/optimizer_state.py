"""Bytes of optimizer state on a rank, and the work of whole matrices on their owners.

Element-wise state lies where ZeRO stores the elements, state of whole matrices on their owners (`layout.owners`). The
rank with most of both is counted.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from megascale.catalog.optimizers import ALL_KINDS
from megascale.config.run import RunConfig
from megascale.config.train import OptimizerConfig
from megascale.layout.chunks import bucket_sizes, stage_elements
from megascale.layout.owners import OwnedMatrix, update_cost
from megascale.layout.param_groups import ParamGroup, ParamGroups
from megascale.layout.topology import topology_of
from megascale.plan.account.sizes import data_ranks
from megascale.plan.account.stage_matrices import StageMatrices, stage_places


@dataclass(frozen=True)
class StageOptimizer:
    """The optimizer on the ranks of a pipeline stage, of a resolved configuration."""

    config: RunConfig
    stage: int

    @cached_property
    def _matrices(self) -> StageMatrices:
        c = self.config
        return stage_places(c.model, c.parallel, c.overlap, c.train, c.optimizer, self.stage)

    @property
    def _places(self) -> list[OwnedMatrix]:
        """The matrices of all buckets that are updated as a whole."""
        return [*chain(*self._matrices.places)] if is_mixed(self.config.optimizer) else []

    def state_bytes(self, zero: int) -> int:
        """Count the bytes of optimizer state on the fullest rank, without master weights. `zero`: the stage of ZeRO,
        which may be another system's.
        """
        c, p, (_, wide) = self.config, self.config.parallel, self.config.train.element_bytes
        if not is_mixed(c.optimizer):
            chunks = bucket_sizes(c.model, p, c.overlap, c.train, self.stage)
            elements, shard = stage_elements(chunks, topology_of(p))
            return wide * len(ParamGroups(c.optimizer).default.state) * (shard if zero else elements)
        flat, owned = self._flat_elements(bool(zero)), Counter[tuple[int, int]]()
        for place in self._places:
            for tp in range(p.tp) if place.tp_owner is None else [place.tp_owner]:
                owned[tp, place.dp_owner or 0] += place.group.state_bytes(place.shape, wide)
        shards = {*flat, *(dp for _, dp in owned)}
        return max((wide * flat[dp] + owned[tp, dp] for dp in shards for tp in range(p.tp)), default=0)

    def _flat_elements(self, sharded: bool) -> Counter[int]:
        """Count elements of element-wise state by data-parallel rank; rank 0 stands for all without ZeRO."""
        found = Counter[int]()
        for layout, ranges in zip(self._matrices.layouts, self._matrices.ranges, strict=True):
            size = layout.numel // layout.num_shards if sharded else layout.numel
            for group, item in ranges:
                tensors = 0 if group.needs_matrix else len(group.state)
                for shard in range(item.start // size, (item.stop - 1) // size + 1) if tensors else ():
                    found[shard] += tensors * (min(item.stop, (shard + 1) * size) - max(item.start, shard * size))
        return found

    def update_bytes(self) -> int:
        """Estimate the bytes of temporary tensors of an update of whole matrices, on an average rank: messages of
        gradients (and weights) in the beginning or directions in the end, and the work on one matrix.
        """
        sizes = [math.prod(place.shape) for place in self._places]
        if not sizes:
            return 0
        p, (_, wide) = self.config.parallel, self.config.train.element_bytes
        tp, dp = p.tp, data_ranks(p) if p.zero else 1
        weights = sum(math.prod(place.shape) for place in self._places if place.group.facts["weight"])
        sent = (2 * sum(sizes) + weights) / (tp * dp) * (1 - 1 / dp)
        directions = sum(sizes) / (tp * dp) * (2 - 1 / tp) if tp * dp > 1 else 0
        work = max(place.group.facts["temporaries"] * math.prod(place.shape) for place in self._places)
        return int(wide * (max(sent, directions) + work))

    def fullest_owner(self) -> list[tuple[ParamGroup, tuple[int, ...]]]:
        """List the matrices of the owner with most work, by group and shape."""
        work, owned = Counter[tuple[int, int]](), defaultdict[tuple[int, int], list[OwnedMatrix]](list)
        for place in self._places:
            owner = place.tp_owner or 0, place.dp_owner or 0
            work[owner] += update_cost(place.group, place.shape)
            owned[owner].append(place)
        return [(place.group, place.shape) for place in owned[work.most_common(1)[0][0]]] if work else []


def is_mixed(optimizer: OptimizerConfig) -> bool:
    """Return True if parameters have different state: several groups, or a rule of whole matrices."""
    default = ParamGroups(optimizer).default
    return bool(optimizer.groups) or default.needs_matrix or set(default.facts["kinds"]) != set(ALL_KINDS)
