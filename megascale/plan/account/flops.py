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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megascale.config.model import ModelConfig
from megascale.config.run import RunConfig
from megascale.layout.blocks import (
    AttentionSpec,
    BlockSpec,
    TiledMLP,
    block_spec,
    is_skippable,
    parts_of_type,
    skippable_rows,
    tile_mlp,
    weight_numel,
)
from megascale.layout.chunks import stages_of
from megascale.layout.document_lengths import count_document_scores
from megascale.layout.document_shards import row_sharding
from megascale.layout.mask_blocks import mask_blocks, tiles
from megascale.layout.recompute_policy import NO_RECOMPUTE, RecomputePolicy, recompute_policy
from megascale.layout.sequence_shard import Spans, TokenSpan, sequence_chunk
from megascale.layout.tensors import padded_vocab
from megascale.plan.account.attended import Scores, expected_documents, expected_scores, scores_per_token

if TYPE_CHECKING:
    from megascale.layout.hybrid.sequence_work import SequenceWork


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of forward and backward per token. `linear`: GEMMs with weights, including the head; `full_attention`,
    `causal_attention`: the two GEMMs of attention, Q K^T and P V.
    """

    linear: float
    full_attention: float
    causal_attention: float

    @property
    def full(self) -> float:
        """FLOPs with the full attention matrix, or the full window of every query."""
        return self.linear + self.full_attention

    @property
    def causal(self) -> float:
        """FLOPs with the unmasked scores only."""
        return self.linear + self.causal_attention

    def __add__(self, other: TokenFlops) -> TokenFlops:
        return TokenFlops(*map(sum, zip(vars(self).values(), vars(other).values(), strict=True)))


def token_flops(model: ModelConfig, scores: Scores | None = None) -> TokenFlops:
    """Count the model FLOPs of training per token. `scores`: per token, by default of sequences of `seq_length`."""
    total, scores = TokenFlops(head_flops(model), 0.0, 0.0), scores or scores_per_token(model)
    for described in (block_spec(model, layer) for layer in range(model.num_layers)):
        forward = forward_flops(described, weight_numel(described), scores)
        total += forward + forward + forward
    return total


def sequence_flops(config: RunConfig) -> SequenceWork:
    """Count the FLOPs of training on a sequence, by its length: per token, and of causal attention per square token in
    layers without a window.
    """
    from megascale.layout.hybrid.sequence_work import SequenceWork

    flops = token_flops(config.model, scores_per_token(config.model))
    open_layers = [window for window in config.model.windows if window is None]
    quadratic = 3 * 2 * config.model.num_heads * config.model.head_dim * len(open_layers)
    return SequenceWork(flops.linear, float(quadratic))


def head_flops(model: ModelConfig) -> float:
    """Count the head's FLOPs per token, a part of `TokenFlops.linear`."""
    return 6 * model.hidden_size * model.vocab_size


def hardware_flops(config: RunConfig, scores: Scores | None = None) -> TokenFlops:
    """Count the FLOPs of training per token with activation recomputation: of attention, or with `full` of the block
    without its last GEMM, whose result has no use in backward; of an MLP in tiles without its last GEMM; and of the
    forwards of chunks that are recomputed.
    `scores`: per token, by default as the run expects them.
    """
    scores = scores or expected_scores(config)
    layout, total = stages_of(config), token_flops(config.model, scores)
    for stage in range(layout.count):
        recompute = recompute_policy(config.train, stage // layout.pp)
        for layer in layout.layers(stage) if recompute != NO_RECOMPUTE else ():
            described = block_spec(config.model, layer)
            again = forward_flops(described, recomputed(described, recompute), scores)
            total += again if recompute.full or recompute.attention else TokenFlops(again.linear, 0.0, 0.0)
    dropped = config.dropped_share / 3  # a forward is a third of all
    return total + TokenFlops(*(dropped * flops for flops in vars(token_flops(config.model, scores)).values()))


def forward_flops(described: BlockSpec, elements: int, scores: Scores) -> TokenFlops:
    """Count the forward FLOPs of a block per token: GEMMs with `elements` of weights, and attention."""
    full = causal = 0.0
    for part in parts_of_type(described, AttentionSpec):
        flops_per_key = 2 * 2 * part.heads * part.head_dim
        full += flops_per_key * scores[part.window][0]
        causal += flops_per_key * scores[part.window][1]
    return TokenFlops(2 * elements, full, causal)


def recomputed(described: BlockSpec, recompute: RecomputePolicy) -> int:
    """Count the elements of a block's weights with recomputed GEMMs. An MLP in tiles that full recomputation skips is
    recomputed once, by its tiles.
    """
    last, elements = skippable_rows(described), 0
    if recompute.full:
        elements = weight_numel(described) - (last.weight_numel if last else 0)
    for mlp in parts_of_type(tile_mlp(described, recompute.mlp_tiles), TiledMLP):
        elements += 0 if recompute.full and is_skippable(described, mlp) else mlp.columns.weight_numel
    return elements


def rank_flops(config: RunConfig, pp_rank: int, cp_rank: int = 0) -> int:
    """Count the FLOPs executed in a step by a rank of pipeline stage `pp_rank`, for a resolved configuration. Of ranks
    that share sequences with a window, those near the head have less.
    """
    m, tp = config.model, config.parallel.tp
    layout, total = stages_of(config), 0
    for chunk in range(layout.vpp):
        index, recompute = layout.index(pp_rank, chunk), recompute_policy(config.train, chunk)
        total += sum(layer_flops(config, layer, recompute, cp_rank) for layer in layout.layers(index))
        if index == layout.count - 1:
            tokens = 3 * m.seq_length // config.parallel.cp + config.dropped_chunks * config.row_tokens
            total += 2 * config.batch.micro * tokens * m.hidden_size * padded_vocab(m, tp) // tp
    return config.num_microbatches // config.num_chunks * total


def layer_flops(config: RunConfig, layer: int, recompute: RecomputePolicy, cp_rank: int = 0) -> int:
    """Count the FLOPs executed by one rank in a block, per micro-batch of whole samples. Attention has two GEMMs in
    forward and four in backward, or five if fused, for the scores are recomputed.
    """
    m, p, described = config.model, config.parallel, block_spec(config.model, layer)
    total = 2 * m.seq_length // p.cp * (3 * weight_numel(described) + recomputed(described, recompute))
    total += 2 * config.dropped_chunks * config.row_tokens * weight_numel(described)
    for part in parts_of_type(described, AttentionSpec):
        passes = 2 + (4 if m.dropout else 5) + (2 if recompute.full or recompute.attention else 0)
        by_chunk = [_computed_scores(config, part, cp_rank)]
        if config.num_chunks > 1:
            by_chunk = _scores_by_chunk(config, part)
        scores = passes * sum(by_chunk) + 2 * sum(by_chunk[: config.dropped_chunks])
        total += 2 * part.heads // p.cp_heads * part.head_dim * scores
    return config.batch.micro * total // config.parallel.tp


def _computed_scores(config: RunConfig, part: AttentionSpec, cp_rank: int) -> int:
    """Count the scores per head that a rank computes of a row."""
    m, p, lengths = config.model, config.parallel, expected_documents(config)
    if m.dropout:
        return m.seq_length**2
    if p.cp_keys == 1:
        return count_document_scores(lengths, part.block_window(m.seq_length))
    recipe = config.fp8.recipe if config.train.quantizes else None
    sharding, starts = row_sharding(p, m, recipe, cp_rank), [[0, *itertools.accumulate(lengths[:-1])]]
    assert sharding is not None, "ranks that exchange keys share sequences"
    shard = sharding.shard(starts * config.batch.micro)
    within = starts if config.data.mask == "document" else None
    queries = shard.joined(cp_rank - cp_rank % p.cp_heads, p.cp_heads)
    if p.cp_mode == "allgather":
        keys: list[Spans] = [(TokenSpan(0, m.seq_length),)]
    else:
        keys = [shard.joined(first, p.cp_heads) for first in range(0, p.cp, p.cp_heads)]
    blocks = (block for spans in keys for block in mask_blocks(queries, spans, part.window, within, m.seq_length))
    return sum(tile.scores for block in blocks for tile in tiles(block))


def _scores_by_chunk(config: RunConfig, part: AttentionSpec) -> list[int]:
    """Count the scores per head that are computed of each chunk of a row."""
    s, totals = config.model.seq_length, list[int]()
    starts = [[0, *itertools.accumulate(expected_documents(config)[:-1])]]
    within = starts if config.data.mask == "document" else None
    chunks = sequence_chunk(s, config.row_tokens, 0).parts
    for index, queries in enumerate(chunks):
        blocks = (block for keys in chunks[: index + 1] for block in mask_blocks(queries, keys, part.window, within, s))
        totals.append(sum(tile.scores for block in blocks for tile in tiles(block)))
    return totals


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops: float) -> float:
    """Model FLOPs utilization in [0, 1]. `peak_flops`: FLOP/s of all devices together."""
    return flops_per_token * tokens_per_s / peak_flops
