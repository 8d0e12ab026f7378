"""State of a rank between steps: parameters, gradients and optimizer state, exactly (`state_bytes`).

For N parameters of c bytes in the compute and a in the accumulation dtype, d ranks that shard and ZeRO stage z
(Rajbhandari et al. 2020): parameters c N, for z = 3 divided by d, plus 2 bytes per FP8 weight, or 1 / d of its code. Of
weights gathered as codes with z = 1 or 2 a rank has c N / d and both FP8 copies, the first of which is gathered;
gradients a N, for z >= 2 divided by d; optimizer (k + 1) a N, for z >= 1 divided by d, with k state tensors and, if the
two dtypes differ, master weights. Parameters of experts are divided by the ranks along edp. State of whole matrices is
on their owners (`account.optimizer_state`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.layout.blocks import distinct_blocks, linears
from megascale.layout.buckets import AHEAD, SHARDED, sub_groups
from megascale.layout.chunks import bucket_sizes, fp8_layers, stage_elements, stages_of
from megascale.layout.topology import topology_of
from megascale.plan.account.optimizer_state import StageOptimizer
from megascale.plan.account.sizes import coded_elements, gathered_bytes


@dataclass(frozen=True)
class WeightStorage:
    """Storage of a trainer: FP8 copies beside bf16 weights or instead of them; if sharded `masters_alone`, cast at
    each gather (FSDP); `gradient_bytes` an element of unreduced gradients of a unit, 0 for the accumulation dtype.
    """

    fp8_weights: Literal["beside", "instead"] = "beside"
    masters_alone: bool = False
    gradient_bytes: int = 0


THIS_TRAINER = WeightStorage()


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank that persist between steps."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def state_bytes(config: RunConfig, stage: int, storage: WeightStorage = THIS_TRAINER) -> StateBytes:
    """Count the state of a rank of a pipeline stage, for a resolved configuration."""
    facts, topology = PRECISIONS[config.train.precision].facts, topology_of(config.parallel)
    compute, accumulate = config.train.element_bytes
    zero = config.parallel.zero
    sharded = SHARDED[zero]
    layout, fp8 = stages_of(config.model, config.parallel), fp8_layers(config.model, config.train, config.fp8)
    blocks, numbers = distinct_blocks(config.model)
    layers = chain(*(layout.layers(layout.index(stage, chunk)) for chunk in range(layout.vpp)))
    quantized = [blocks[numbers[layer]] for layer in layers if layer in fp8]
    cast = sum(layer.weight_numel for block in quantized for layer in linears(block)) // config.parallel.tp
    if config.fp8.facts["serves_experts"]:
        cast += sum(part.expert_numel for block in quantized for part in block) // config.parallel.ep
    beside = storage.fp8_weights == "beside"
    cast_bytes = int((config.fp8.facts["weight_bytes"] - (0 if beside else compute)) * cast)
    chunks = bucket_sizes(config.model, config.parallel, config.overlap, config.train, stage)
    weights, weight_shard, _ = stage_elements(chunks, topology, trained=False)
    elements, shard, state = stage_elements(chunks, topology, trained=True)
    coded = {bucket: numel for bucket in chain(*chunks) if (numel := coded_elements(config, bucket)) and beside}
    if "weight" in sharded:
        cast_bytes = sum(bucket.shard(topology) for bucket in coded)
    else:
        cast_bytes += sum(gathered_bytes(config, bucket) - numel for bucket, numel in coded.items())
        cast_bytes -= compute * sum(bucket.numel - bucket.shard(topology) for bucket in coded)
    sizes = {"weight": (weights, weight_shard), "gradient": (elements, shard), "state": (elements, state)}
    held = {kind: sizes[kind][kind in sharded] for kind in sizes}
    averages = {"none": 0, "ema": 1, "lawa": config.train.weight_average_count}  # each as large as master weights
    on_device = config.optimizer.offload == "none"
    master = compute if config.optimizer.master_weights == "bf16_compensated" else accumulate
    copies = averages[config.train.weight_average] + config.sites.state_tensors
    master_bytes = (master if facts["master_weights"] else 0) + accumulate * copies
    alone = storage.masters_alone and facts["master_weights"] and "weight" in sharded
    return StateBytes(
        parameters=0 if alone else compute * held["weight"] + cast_bytes,
        gradients=accumulate * held["gradient"],
        optimizer=StageOptimizer(config, stage).state_bytes(zero) + master_bytes * held["state"] if on_device else 0,
    )


def state_shards(config: RunConfig, stage: int) -> list[int]:
    """Count the elements of each bucket whose optimizer state a rank of a stage has."""
    p, topology = config.parallel, topology_of(config.parallel)
    buckets = chain(*bucket_sizes(config.model, p, config.overlap, config.train, stage))
    return [stage_elements([[bucket]], topology, trained=True)[2 if p.zero else 0] for bucket in buckets]


def host_state_bytes(config: RunConfig) -> int:
    """Count the bytes of `optimizer.offload` in host memory, of the rank with most: master weights, state and gradients
    on their way.
    """
    settings, (_, wide), found = config.optimizer, config.train.element_bytes, [0]
    for stage in range(config.parallel.pp if settings.offload != "none" else 0):
        shards, state = state_shards(config, stage), StageOptimizer(config, stage).state_bytes(config.parallel.zero)
        read = 0 if settings.offload_stride == 1 else AHEAD * sub_groups(0, max(shards))[0][1]
        found.append(state + wide * (sum(shards) + read))
    return max(found)


def fetched_bytes(config: RunConfig, stage: int) -> int:
    """Bound the bytes of `optimizer.offload` that the update of a bucket has on the device: master weights and state of
    sub-groups that are updated there, and master weights of one that is not. An unknown stride counts as any.
    """
    settings, (_, wide), shards = config.optimizer, config.train.element_bytes, state_shards(config, stage)
    if settings.offload == "none" or not any(shards):
        return 0
    stride, groups = settings.offload_stride, sub_groups(0, max(shards))
    of_element = wide + StageOptimizer(config, stage).state_bytes(config.parallel.zero) / sum(shards)
    fetched = 0 if stride == 0 else min(AHEAD, math.ceil(len(groups) / (stride or 1)))
    rounded = stride == 0 or (stride != 1 and len(groups) > 1)
    return int(groups[0][1] * (fetched * of_element + rounded * wide))
