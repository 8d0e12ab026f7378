"""FLOPs that a rank executes in a step (`rank_flops`), which a dry run counts, too: also the padded vocabulary, keys
masked inside a block of a window's queries, the scores recomputed by the backward of fused attention, and zeros behind
the rows of experts in wgrad.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import partial

from megascale.config.run import RunConfig
from megascale.config.sparse_pattern import SparsePattern
from megascale.layout.blocks import block_spec
from megascale.layout.chunks import fp8_layers, stages_of
from megascale.layout.document_shards import row_sharding
from megascale.layout.freezing import mark_frozen, matches
from megascale.layout.mask_blocks import tiles
from megascale.layout.parameters import layer_params
from megascale.layout.parts.attention import AttentionSpec
from megascale.layout.parts.linear_attention import LinearAttentionSpec
from megascale.layout.recompute_policy import RecomputePolicy, recompute_policy
from megascale.layout.sequence_shard import Spans, TokenSpan, sequence_chunk
from megascale.layout.sparse_blocks import visible_blocks
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING, padded_vocab
from megascale.layout.windows import count_scores
from megascale.parallel.experts.fp8_gemms import ALIGNMENT
from megascale.plan.account.attended import expected_documents
from megascale.plan.account.flops import recomputed_weights


def rank_flops(config: RunConfig, pp_rank: int, cp_rank: int = 0) -> int:
    """Count the FLOPs executed in a step by a rank of pipeline stage `pp_rank`, for a resolved configuration. Of ranks
    that share sequences with a window, those near the head have less.
    """
    m, tp = config.model, config.parallel.tp
    layout, samples, every = stages_of(config.model, config.parallel), config.num_microbatches // config.num_chunks, 0
    for chunk in range(layout.vpp):
        index, policy = layout.index(pp_rank, chunk), partial(recompute_policy, config.train)
        total = sum(_layer_flops(config, layer, policy(layer), cp_rank) for layer in layout.layers(index))
        heads = sum(after - 1 in layout.layers(index) for after in m.exits)
        heads += 1 + m.mtp_layers if index == layout.count - 1 else 0
        passes = 2 if matches(TOKEN_EMBEDDING if m.tie_embeddings else HEAD, config.train.freeze) else 3
        tokens = passes * m.seq_length // config.parallel.cp + config.dropped_chunks * config.row_tokens
        total += 2 * config.batch.micro * heads * tokens * m.hidden_size * padded_vocab(m, tp) // tp
        every += layout.placement.visits(pp_rank, chunk, samples) * total
    return every


def _layer_flops(config: RunConfig, layer: int, recompute: RecomputePolicy, cp_rank: int) -> int:
    """Count the FLOPs executed by one rank in a block, per micro-batch of whole samples. Attention has two GEMMs in
    forward and four in backward, or five if fused, for the scores are recomputed.
    """
    m, p, described = config.model, config.parallel, block_spec(config.model, layer)
    weights = sum(part.token_weights for part in described)
    params = [param for param in mark_frozen(layer_params(m, layer), config.train.freeze) if param.kind == "matrix"]
    frozen = 0
    for param in (param for param in params if param.frozen):
        numel = sum(math.prod(tensor.shape) for tensor in param.parts)
        frozen += numel // m.experts * m.experts_per_token if "ep" in param.sharding else numel
    total = 2 * m.seq_length // p.cp * (3 * weights - frozen + recomputed_weights(described, recompute))
    repeated = 0 if p.sp else (p.tp - 1) * sum(part.whole_numel for part in described)  # on every tp rank
    total += 2 * m.seq_length // p.cp * (3 + recompute.full) * repeated
    total += _zeros_of_experts(config, layer)
    total += 2 * config.dropped_chunks * config.row_tokens * weights
    passes = 2 + (4 if m.dropout else 5) + (2 if recompute.full or recompute.attention else 0)
    for core in (part for part in described if isinstance(part, AttentionSpec)):
        by_chunk = list(_computed_scores(config, core, cp_rank))
        scores = passes * sum(by_chunk) + 2 * sum(by_chunk[: config.dropped_chunks])
        total += 2 * core.heads // p.cp_heads * core.head_dim * scores
    for linear in (part for part in described if isinstance(part, LinearAttentionSpec)):
        total += linear.heads * _linear_attention_flops(config, linear, recompute, cp_rank)
    return config.batch.micro * total // config.parallel.tp


def _zeros_of_experts(config: RunConfig, layer: int) -> int:
    """Count the FLOPs per sample of zeros in wgrad, up to whole blocks of the FP8 scales of an expert's rows, of which
    all experts have as many.
    """
    m, p, facts = config.model, config.parallel, config.fp8.facts
    quantized = layer in fp8_layers(m, config.train, config.fp8) and facts["free_borders"]
    if not (m.has_experts(layer) and quantized):
        return 0
    tokens, blocks = config.batch.micro * m.seq_length // p.cp // p.tp * p.ep, config.moe.token_blocks
    rows = tokens * m.experts_per_token // m.experts // blocks
    zeros = -rows % (facts["input_column"].block.k or ALIGNMENT) * blocks
    weights = sum(part.expert_numel for part in block_spec(m, layer))
    return 2 * zeros * weights * p.tp // p.ep // config.batch.micro


def _computed_scores(config: RunConfig, core: AttentionSpec, cp_rank: int) -> Iterator[int]:
    """Count the scores per head that a rank computes of a row, or of each of its chunks."""
    m, p, lengths = config.model, config.parallel, expected_documents(config.model, config.data)
    s, starts = m.seq_length, [[0, *itertools.accumulate(lengths[:-1])]]
    pairs = list[tuple[Spans, list[Spans]]]()  # queries, and the keys that they attend to
    if config.num_chunks > 1:
        chunks = sequence_chunk(s, config.row_tokens, 0).parts
        pairs = [(queries, list(chunks[: index + 1])) for index, queries in enumerate(chunks)]
    elif m.dropout:
        yield s**2
    elif isinstance(core.window, SparsePattern) and p.cp_keys == 1:
        pairs = [((TokenSpan(0, s),), [(TokenSpan(0, s),)])]
    elif p.cp_keys == 1:
        assert not isinstance(core.window, SparsePattern)
        yield count_document_scores(lengths, core.window or (s if core.softcap else None))
    else:
        recipe = config.fp8.facts if config.train.quantizes else None
        sharding = row_sharding(p, m, recipe, cp_rank)
        assert sharding is not None, "ranks that exchange keys share sequences"
        shard, firsts = sharding.shard(starts * config.batch.micro), range(0, p.cp, p.cp_heads)
        everything: list[Spans] = [(TokenSpan(0, s),)]
        keys = everything if p.cp_mode == "allgather" else [shard.joined(first, p.cp_heads) for first in firsts]
        pairs = [(shard.joined(cp_rank - cp_rank % p.cp_heads, p.cp_heads), keys)]
    within = starts if config.data.attention_mask == "document" else None
    heads = range(core.heads)
    for queries, keys in pairs:
        visible = (seen for spans in keys for seen in visible_blocks(queries, spans, core.window, heads, within, s))
        yield (
            sum(
                (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start) * len(heads[seen.heads])
                for seen in visible
                for block in seen.blocks
                for tile in tiles(block)
            )
            // core.heads
        )


def count_document_scores(lengths: Iterable[int], block_window: int | None) -> int:
    """Count the scores per head that are computed document by document. `block_window`: by which torch
    computes in blocks of queries; None for all scores at once.
    """
    return sum(count_scores(n, None if block_window is None else min(block_window, n)) for n in lengths)


def _linear_attention_flops(
    config: RunConfig, core: LinearAttentionSpec, recompute: RecomputePolicy, cp_rank: int
) -> int:
    """Count the FLOPs of linear attention per head and row: in forward two GEMMs of a block's scores and one for the
    state, in backward five, the state again but for the last block, and its gradient. A block after a state has
    one more GEMM and one in backward, a block before one two in backward. Ranks that share sequences first compute the
    states of their spans, and the gradients.
    """
    p, d = config.parallel, core.head_dim
    sizes = [config.row_tokens] * config.num_chunks
    spans = [TokenSpan(index * size, (index + 1) * size) for index, size in enumerate(sizes)]
    if p.cp > 1:
        sharding = row_sharding(p, config.model, config.fp8.facts if config.train.quantizes else None, cp_rank)
        assert sharding is not None, "ranks share sequences"
        lengths = expected_documents(config.model, config.data)
        within = config.data.attention_mask == "document"
        starts = [[0, *itertools.accumulate(lengths[:-1])]] * config.batch.micro
        spans = list(sharding.shard(starts if within else None).spans)
    forwards, backwards = list[int](), list[int]()
    for span in spans:
        blocks = [min(core.block, span.size - at) for at in range(0, span.size, core.block)]
        first, last = span.start == 0, span.stop == config.model.seq_length
        scores, states = sum(2 * n * n * d for n in blocks), sum(2 * n * d * d for n in blocks)
        known, followed = states - first * 2 * blocks[0] * d * d, states - last * 2 * blocks[-1] * d * d
        alone = states if p.cp > 1 else 0
        forwards.append(2 * scores + states + known + alone)
        backwards.append(5 * scores + states - 2 * blocks[-1] * d * d + known + 2 * followed + states + alone)
    repeated = 1 + (recompute.full or recompute.attention)
    return repeated * sum(forwards) + sum(backwards) + sum(forwards[: config.dropped_chunks])
