"""Bytes of optimizer state on a rank, and the work of whole matrices on their owners.

Element-wise state lies where ZeRO stores the elements, state of whole matrices on their owners (`layout.owners`). The
rank with most of both is counted.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from megascale.catalog.optimizers import ALL_KINDS
from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.config.train import OptimizerConfig
from megascale.layout.chunks import bucket_sizes
from megascale.layout.owners import OwnedMatrix, StageMatrices, stage_places, update_cost
from megascale.layout.param_groups import ParamGroup, ParamGroups
from megascale.layout.topology import DATA_AXES, topology_of

TEMPORARIES = 6
"""Tensors of a matrix's size at the peak of its update: of dry runs of Muon and Adafactor, 3 to 8."""


def optimizer_state_bytes(config: RunConfig, stage: int, zero: int) -> int:
    """Count the bytes of optimizer state on the fullest rank of a pipeline stage, without master weights. `zero`: the
    stage of ZeRO, which may be another system's.
    """
    wide: int = PRECISIONS[config.train.precision].facts["accumulate_bytes"]
    if not is_mixed(config.optimizer):
        ranks = topology_of(config).size(*DATA_AXES) if zero else 1
        elements = sum(bucket.numel for chunk in bucket_sizes(config, stage) for bucket in chunk)
        return wide * len(ParamGroups(config.optimizer).default.state) * (elements // ranks)
    places = stage_places(config, stage)
    flat, owned = _flat_elements(places, bool(zero)), _owned_bytes(config.parallel.tp, places, wide)
    shards = {*flat, *(dp for _, dp in owned)}
    tp_ranks = range(config.parallel.tp)
    return max((wide * flat[dp] + owned[tp, dp] for dp in shards for tp in tp_ranks), default=0)


def is_mixed(optimizer: OptimizerConfig) -> bool:
    """Return True if parameters have different state: several groups, or a rule of whole matrices."""
    default = ParamGroups(optimizer).default
    return bool(optimizer.groups) or default.needs_matrix or set(default.facts["kinds"]) != set(ALL_KINDS)


def _flat_elements(places: StageMatrices, sharded: bool) -> Counter[int]:
    """Count elements of element-wise state by data-parallel rank; rank 0 stands for all without ZeRO."""
    found = Counter[int]()
    for layout, ranges in zip(places.layouts, places.ranges, strict=True):
        size = layout.numel // layout.num_shards if sharded else layout.numel
        for group, item in ranges:
            tensors = 0 if group.needs_matrix else len(group.state)
            for shard in range(item.start // size, (item.stop - 1) // size + 1) if tensors else ():
                found[shard] += tensors * (min(item.stop, (shard + 1) * size) - max(item.start, shard * size))
    return found


def _owned_bytes(tp_ranks: int, places: StageMatrices, wide: int) -> Counter[tuple[int, int]]:
    """Count bytes of state of whole matrices by (tp, data-parallel rank)."""
    found = Counter[tuple[int, int]]()
    for place in all_places(places):
        size = place.group.state_bytes(place.shape, wide)
        owners = range(tp_ranks) if place.tp_owner is None else [place.tp_owner]
        for tp in owners:
            found[tp, place.dp_owner or 0] += size
    return found


def update_bytes(config: RunConfig, stage: int) -> int:
    """Estimate the bytes of temporary tensors of an update of whole matrices, on an average rank of a stage: messages
    of gradients (and weights) in the beginning or directions in the end, and the work on the largest matrix.
    """
    places = list(all_places(stage_places(config, stage))) if is_mixed(config.optimizer) else []
    if not places:
        return 0
    wide: int = PRECISIONS[config.train.precision].facts["accumulate_bytes"]
    tp, dp = config.parallel.tp, topology_of(config).size(*DATA_AXES) if config.parallel.zero else 1
    sizes = [math.prod(place.shape) for place in places]
    weights = sum(size for size, place in zip(sizes, places, strict=True) if place.group.facts["weight"])
    sent = (2 * sum(sizes) + weights) / (tp * dp) * (1 - 1 / dp)
    directions = sum(sizes) / (tp * dp) * (2 - 1 / tp) if tp * dp > 1 else 0
    return int(wide * (max(sent, directions) + TEMPORARIES * max(sizes)))


def fullest_owner(config: RunConfig, stage: int) -> list[tuple[ParamGroup, tuple[int, int]]]:
    """List the matrices of the owner with most work on a pipeline stage, by group and shape."""
    if not is_mixed(config.optimizer):
        return []
    work, owned = (
        Counter[tuple[int, int]](),
        defaultdict[tuple[int, int], list[tuple[ParamGroup, tuple[int, int]]]](list),
    )
    for place in all_places(stage_places(config, stage)):
        owner = place.tp_owner or 0, place.dp_owner or 0
        work[owner] += update_cost(place.group, place.shape)
        owned[owner].append((place.group, place.shape))
    return owned[work.most_common(1)[0][0]] if work else []


def all_places(places: StageMatrices) -> Iterator[OwnedMatrix]:
    """Yield the matrices of all buckets."""
    for of_bucket in places.places:
        yield from of_bucket
