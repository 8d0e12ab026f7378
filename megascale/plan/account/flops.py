"""FLOPs of training, from the configuration and the description of a block (`layout.blocks`).

A multiply-add is two FLOPs; only GEMMs and attention count, and a backward costs twice the forward. Attention is
counted by two conventions: `full`, s x s scores per head, as in Megatron-LM and PaLM; `causal`, the half left by a
causal mask. With a window of w keys, a query has w scores in `full` and w - w^2 / (2 s) on average in `causal`.
For hidden size h, l layers, vocabulary V, f = 4 h and no grouped heads, `full` is 72 l h^2 (1 + s/(6 h) + V/(12 l h))
per token (Narayanan et al. 2021). HFU counts recomputation (`hardware_flops`), MFU does not (`token_flops`, `mfu`).
With a document mask only scores within documents count, in both conventions (`account.attended`).

`rank_flops` counts executed FLOPs: also the padded vocabulary, keys masked inside a block of a window's queries, and
the scores recomputed by the backward of fused attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.layout.blocks import block_spec, is_skippable, weight_numel
from megascale.layout.chunks import stages_of
from megascale.layout.document_lengths import count_document_scores
from megascale.layout.document_shards import row_sharding
from megascale.layout.hybrid.sequence_work import SequenceWork
from megascale.layout.mask_blocks import mask_blocks, tiles
from megascale.layout.parts.flops import Scores, TokenFlops
from megascale.layout.parts.part import AttentionCore, BlockSpec
from megascale.layout.parts.tiled_mlp import tile_mlp
from megascale.layout.recompute_policy import NO_RECOMPUTE, RecomputePolicy, recompute_policy
from megascale.layout.sequence_shard import Spans, TokenSpan, sequence_chunk
from megascale.layout.tensors import padded_vocab
from megascale.plan.account.attended import expected_documents, expected_scores, scores_per_token


def token_flops(model: ModelConfig, scores: Scores | None = None) -> TokenFlops:
    """Count the model FLOPs of training per token. `scores`: per token, by default of sequences of `seq_length`."""
    total, scores = TokenFlops(head_flops(model)), scores or scores_per_token(model)
    for described in (block_spec(model, layer) for layer in range(model.num_layers)):
        forward = sum((part.flops(scores) for part in described), TokenFlops(0))
        total += forward + forward + forward
    return total


def sequence_flops(model: ModelConfig) -> SequenceWork:
    """Count the FLOPs of training on a sequence, by its length: per token, and of causal attention per square token in
    layers without a window.
    """
    quadratic = 3 * 2 * model.num_heads * model.head_dim * model.windows.count(None)
    return SequenceWork(token_flops(model).linear, float(quadratic))


def head_flops(model: ModelConfig) -> float:
    """Count the head's FLOPs per token, a part of `TokenFlops.linear`."""
    return 6 * model.hidden_size * model.vocab_size


def hardware_flops(config: RunConfig, scores: Scores | None = None) -> TokenFlops:
    """Count the FLOPs of training per token with activation recomputation: of attention, or with `full` of the block
    without its last GEMM, whose result has no use in backward; of an MLP in tiles without its last GEMM; and of the
    forwards of chunks that are recomputed.
    `scores`: per token, by default as the run expects them.
    """
    scores = scores or expected_scores(config.model, config.data)
    layout, total = stages_of(config), token_flops(config.model, scores)
    for stage in range(layout.count):
        recompute = recompute_policy(config.train, stage // layout.pp)
        for layer in layout.layers(stage) if recompute != NO_RECOMPUTE else ():
            described = block_spec(config.model, layer)
            cores = described if recompute.full or recompute.attention else ()
            again = TokenFlops(2 * recomputed_weights(described, recompute))
            total += sum((part.flops(scores) for part in cores if part.core), again)
    dropped = config.dropped_share / 3  # a forward is a third of all
    return total + TokenFlops(*(dropped * flops for flops in vars(token_flops(config.model, scores)).values()))


def recomputed_weights(block: BlockSpec, recompute: RecomputePolicy) -> int:
    """Count the elements of a block's weights with recomputed GEMMs."""
    parts = tile_mlp(block, recompute.mlp_tiles)
    return sum(part.recomputed_weights(recompute.full, is_skippable(block, part)) for part in parts)


def rank_flops(config: RunConfig, pp_rank: int, cp_rank: int = 0) -> int:
    """Count the FLOPs executed in a step by a rank of pipeline stage `pp_rank`, for a resolved configuration. Of ranks
    that share sequences with a window, those near the head have less.
    """
    m, tp = config.model, config.parallel.tp
    layout, total = stages_of(config), 0
    for chunk in range(layout.vpp):
        index, recompute = layout.index(pp_rank, chunk), recompute_policy(config.train, chunk)
        total += sum(_layer_flops(config, layer, recompute, cp_rank) for layer in layout.layers(index))
        if index == layout.count - 1:
            tokens = 3 * m.seq_length // config.parallel.cp + config.dropped_chunks * config.row_tokens
            total += 2 * config.batch.micro * tokens * m.hidden_size * padded_vocab(m, tp) // tp
    return config.num_microbatches // config.num_chunks * total


def _layer_flops(config: RunConfig, layer: int, recompute: RecomputePolicy, cp_rank: int) -> int:
    """Count the FLOPs executed by one rank in a block, per micro-batch of whole samples. Attention has two GEMMs in
    forward and four in backward, or five if fused, for the scores are recomputed.
    """
    m, p, described = config.model, config.parallel, block_spec(config.model, layer)
    total = 2 * m.seq_length // p.cp * (3 * weight_numel(described) + recomputed_weights(described, recompute))
    total += 2 * config.dropped_chunks * config.row_tokens * weight_numel(described)
    passes = 2 + (4 if m.dropout else 5) + (2 if recompute.full or recompute.attention else 0)
    for core in (part.core for part in described if part.core):
        by_chunk = list(_computed_scores(config, core, cp_rank))
        scores = passes * sum(by_chunk) + 2 * sum(by_chunk[: config.dropped_chunks])
        total += 2 * core.heads // p.cp_heads * core.width * scores
    return config.batch.micro * total // config.parallel.tp


def _computed_scores(config: RunConfig, core: AttentionCore, cp_rank: int) -> Iterator[int]:
    """Count the scores per head that a rank computes of a row, or of each of its chunks."""
    m, p, lengths = config.model, config.parallel, expected_documents(config.model, config.data)
    s, starts = m.seq_length, [[0, *itertools.accumulate(lengths[:-1])]]
    pairs = list[tuple[Spans, list[Spans]]]()  # queries, and the keys that they attend to
    if config.num_chunks > 1:
        chunks = sequence_chunk(s, config.row_tokens, 0).parts
        pairs = [(queries, list(chunks[: index + 1])) for index, queries in enumerate(chunks)]
    elif m.dropout:
        yield s**2
    elif p.cp_keys == 1:
        yield count_document_scores(lengths, core.block_window(s))
    else:
        sharding = row_sharding(config, cp_rank)
        assert sharding is not None, "ranks that exchange keys share sequences"
        shard, firsts = sharding.shard(starts * config.batch.micro), range(0, p.cp, p.cp_heads)
        everything: list[Spans] = [(TokenSpan(0, s),)]
        keys = everything if p.cp_mode == "allgather" else [shard.joined(first, p.cp_heads) for first in firsts]
        pairs = [(shard.joined(cp_rank - cp_rank % p.cp_heads, p.cp_heads), keys)]
    within = starts if config.data.mask == "document" else None
    for queries, keys in pairs:
        blocks = (block for spans in keys for block in mask_blocks(queries, spans, core.window, within, s))
        yield sum(tile.scores for block in blocks for tile in tiles(block))


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops: float) -> float:
    """Model FLOPs utilization in [0, 1]. `peak_flops`: FLOP/s of all devices together."""
    return flops_per_token * tokens_per_s / peak_flops
