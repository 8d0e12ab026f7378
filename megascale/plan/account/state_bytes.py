"""State of a rank between steps: parameters, gradients and optimizer state, exactly (`state_bytes`).

For N parameters of c bytes in the compute and a in the accumulation dtype, d ranks that shard and ZeRO stage z
(Rajbhandari et al. 2020): parameters c N, for z = 3 divided by d, plus 2 bytes per FP8 weight, or 1 / d of its code. Of
weights gathered as codes with z = 1 or 2 a rank has c N / d and both FP8 copies, the first of which is gathered;
gradients a N, for z >= 2 divided by d; optimizer (k + 1) a N, for z >= 1 divided by d, with k state tensors and, if the
two dtypes differ, master weights. Parameters of experts are divided by the ranks along edp. State of whole matrices is
on their owners (`account.optimizer_state`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal

from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.layout.blocks import distinct_blocks, linears
from megascale.layout.buckets import SHARDED
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
    elements, shard, state = stage_elements(chunks, topology)
    coded = {bucket: numel for bucket in chain(*chunks) if (numel := coded_elements(config, bucket)) and beside}
    if "weight" in sharded:
        cast_bytes = sum(bucket.shard(topology) for bucket in coded)
    else:
        cast_bytes += sum(gathered_bytes(config, bucket) - numel for bucket, numel in coded.items())
        cast_bytes -= compute * sum(bucket.numel - bucket.shard(topology) for bucket in coded)
    of_shards = {"weight": shard, "gradient": shard, "state": state}
    held = {kind: numel if kind in sharded else elements for kind, numel in of_shards.items()}
    averages = {
        "none": 0,
        "ema": 1,
        "lawa": config.train.weight_average_count,
    }  # tensors, each of the size of master weights
    master = compute if config.optimizer.master_weights == "bf16_compensated" else accumulate
    copies = averages[config.train.weight_average] + config.sites.state_tensors
    master_bytes = (master if facts["master_weights"] else 0) + accumulate * copies
    alone = storage.masters_alone and facts["master_weights"] and "weight" in sharded
    return StateBytes(
        parameters=0 if alone else compute * held["weight"] + cast_bytes,
        gradients=accumulate * held["gradient"],
        optimizer=StageOptimizer(config, stage).state_bytes(zero) + master_bytes * held["state"],
    )
