"""Sizes that several formulas share: of replicated buckets, and of a micro-batch."""

from __future__ import annotations

import math
from itertools import accumulate

from megascale.catalog.schedules import SCHEDULES
from megascale.config.parallel import ParallelConfig
from megascale.config.run import RunConfig
from megascale.layout.chunks import BucketSize, fp8_layers
from megascale.layout.document_shards import row_sharding
from megascale.layout.param_groups import ParamGroups
from megascale.layout.parts.microbatch_sizes import MicroBatchSizes
from megascale.layout.pieces import MAX_PIECES
from megascale.layout.topology import DATA_AXES, inner_axes, topology_of
from megascale.plan.account.attended import expected_documents


def data_ranks(parallel: ParallelConfig) -> int:
    """Count the ranks with replicas of a bucket, over data and context parallelism."""
    return topology_of(parallel).size(*DATA_AXES)


def coded_elements(config: RunConfig, bucket: BucketSize) -> int:
    """Count the elements of a bucket that are gathered as FP8 codes."""
    p, weight = config.parallel, config.fp8.facts["weight"]
    if not config.train.quantizes or config.fp8.schedule:
        return 0
    gathered = p.zero == 3 or (p.zero > 0 and topology_of(p).size(*inner_axes(bucket.reduce_axes)) > 1)
    return bucket.coded(fp8_layers(config.model, config.train, config.fp8), weight) if gathered else 0


def gathered_bytes(config: RunConfig, bucket: BucketSize) -> int:
    """Size the weights of a bucket as they are gathered (`bucket_storage.Sharded`)."""
    coded, compute = coded_elements(config, bucket), config.train.element_bytes[0]
    return compute * (bucket.numel - coded) + (bucket.numel if coded else 0)


def step_gather_bytes(config: RunConfig, bucket: BucketSize) -> int:
    """Size the weights that a step gathers: of frozen ones shards, and codes whose scales follow a history."""
    follows = config.fp8.facts["weight"].scaling == "delayed" and coded_elements(config, bucket) > 0
    stays = bucket.frozen and config.parallel.zero < 3 and not follows
    return 0 if stays else gathered_bytes(config, bucket)


def micro_batch_sizes(config: RunConfig, imbalance: float = 1.0) -> MicroBatchSizes:
    """Return the sizes of a micro-batch of a resolved configuration, outside FP8. `imbalance`: of the loads of experts,
    as in `MicroBatchSizes`; at most that of their capacity.
    """
    if (factor := config.moe.capacity_factor) is not None:
        even = config.model.experts_per_token * config.model.seq_length / config.model.experts  # slots of a sequence
        imbalance = min(imbalance, math.ceil(factor * even) / even)
    p, within = config.parallel, config.data.attention_mask == "document"
    rule = ParamGroups(config.optimizer).default
    return MicroBatchSizes(
        config.model, config.batch.micro, config.row_tokens, p.tp, p.sp and p.tp > 1,
        MAX_PIECES if config.overlap.tp is True else 1, *config.train.element_bytes, p.cp_heads, p.cp_keys,
        max(p.cp_keys, 1 + config.attends_in_parts),  # a chunk attends to its own keys and to others
        p.cp_mode == "allgather", expected_documents(config.model, config.data) if within else (),
        config.fp8.facts, ep=p.ep, imbalance=imbalance,
        gathers_tokens=p.ep > 1 and config.moe.dispatcher == "all_gather", token_blocks=config.moe.token_blocks,
        split=p.schedule is not None and SCHEDULES[p.schedule].facts["split"], cast_where_used=p.zero == 3,
        spans=_spans(config),
        input_rank=rule.all_options["rank"] if rule.facts["input_projection"] else 0,
    )  # fmt: skip


def _spans(config: RunConfig) -> int:
    """Count the most spans of consecutive tokens of a context-parallel rank, for documents as the run expects them."""
    sharding = row_sharding(config.parallel, config.model, config.fp8.facts if config.train.quantizes else None, 0)
    if sharding is None:
        return 1
    lengths = expected_documents(config.model, config.data)
    starts = [[0, *accumulate(lengths[:-1])]] * config.batch.micro if config.data.attention_mask == "document" else None
    return max(map(len, sharding.shard(starts).parts))
