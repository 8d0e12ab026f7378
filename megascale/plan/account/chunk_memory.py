"""Memory of a rank that trains on chunks of sequences with state-aware 1F1B (`chunk_memory`).

Activations: K + p - r - 1 chunks on rank r of p, whatever the longest sequence (`schedule.state_aware`). With the
longest sequence grow only the store of keys and values, with their gradients, of one sequence,
2 kv_heads qk_head_dim (compute + accumulation bytes) per token and layer with scores, and the inputs of dropped chunks,
hidden_size compute bytes per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.config.run import RunConfig
from megascale.plan.account.activations import key_store_bytes
from megascale.plan.account.memory import JobMemory, RankMemory


@dataclass(frozen=True)
class ChunkMemory(RankMemory):
    """Bytes on one rank at the peak. `store`: keys, values and their gradients of the longest sequence; `inputs`: of
    its chunks that are recomputed.
    """

    store: int
    inputs: int


def with_context(config: RunConfig, tokens: int) -> RunConfig:
    """Return a resolved configuration with micro-batches of one sequence of `tokens`, a document each, as many as
    pipeline stages, without context parallelism.
    """
    whole = dict.fromkeys(("document_length", "sequence_chunk_tokens", "max_tokens_per_rank"))
    p, dp = config.parallel, config.dp * config.parallel.cp  # a rank of the pool has all of its tokens
    return config.changed(
        model={"seq_length": tokens},
        parallel={"dp": dp, "cp": 1, "cp_mode": "ring", "cp_a2a_size": 1},
        batch={"micro": 1, "total": dp * p.pp, "rampup": None},
        data={**whole, "sequence_chunks_saved": 1},
    )


def chunk_memory(job: JobMemory, stage: int, chunk_tokens: int, keep: int, longest: int) -> ChunkMemory:
    """Account for a rank of a stage with one model chunk. `keep`: chunks of a sequence that keep their activations;
    `longest`: tokens of the longest sequence.
    """
    p, sizes, alone = job.config.parallel, job.sizes, with_context(job.config, chunk_tokens)
    rank = JobMemory(alone.changed(batch={"total": alone.dp}), job.storage).rank(stage)  # a single micro-batch
    held = [layer for chunk in range(p.vpp) for layer in job.layout.layers(job.layout.index(stage, chunk))]
    chunks = -(-longest // chunk_tokens)
    kept = min(keep, chunks) + p.pp - stage - 1
    store = key_store_bytes(sizes, held, longest, chunks) if chunks > 1 else 0
    dropped = max(0, longest - keep * chunk_tokens)
    inputs = dropped * sizes.model.hidden_size * sizes.compute // (p.tp if p.sp else 1)
    return ChunkMemory(
        rank.parameters, rank.gradients, rank.optimizer, kept * rank.activations, rank.transient, store, inputs
    )
