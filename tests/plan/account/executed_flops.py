"""FLOPs that a rank executes in a step (`rank_flops`), which a dry run counts, too: also the padded vocabulary, keys
masked inside a block of a window's queries, and the scores recomputed by the backward of fused attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import partial

from megascale.config.run import RunConfig
from megascale.layout.blocks import block_spec
from megascale.layout.chunks import stages_of
from megascale.layout.document_shards import row_sharding
from megascale.layout.mask_blocks import mask_blocks, tiles
from megascale.layout.parts.attention import AttentionSpec
from megascale.layout.recompute_policy import RecomputePolicy, recompute_policy
from megascale.layout.sequence_shard import Spans, TokenSpan, sequence_chunk
from megascale.layout.tensors import padded_vocab
from megascale.layout.windows import count_scores
from megascale.plan.account.attended import expected_documents
from megascale.plan.account.flops import recomputed_weights


def rank_flops(config: RunConfig, pp_rank: int, cp_rank: int = 0) -> int:
    """Count the FLOPs executed in a step by a rank of pipeline stage `pp_rank`, for a resolved configuration. Of ranks
    that share sequences with a window, those near the head have less.
    """
    m, tp = config.model, config.parallel.tp
    layout, samples, every = stages_of(config.model, config.parallel), config.num_microbatches // config.num_chunks, 0
    for chunk in range(layout.vpp):
        index, policy = layout.index(pp_rank, chunk), partial(recompute_policy, config.train, chunk)
        total = sum(_layer_flops(config, layer, policy(layer), cp_rank) for layer in layout.layers(index))
        heads = sum(after - 1 in layout.layers(index) for after in m.exits)
        heads += 1 + m.mtp_layers if index == layout.count - 1 else 0
        tokens = 3 * m.seq_length // config.parallel.cp + config.dropped_chunks * config.row_tokens
        total += 2 * config.batch.micro * heads * tokens * m.hidden_size * padded_vocab(m, tp) // tp
        every += layout.placement.visits(pp_rank, chunk, samples) * total
    return every


def _layer_flops(config: RunConfig, layer: int, recompute: RecomputePolicy, cp_rank: int) -> int:
    """Count the FLOPs executed by one rank in a block, per micro-batch of whole samples. Attention has two GEMMs in
    forward and four in backward, or five if fused, for the scores are recomputed.
    """
    m, p, described = config.model, config.parallel, block_spec(config.model, layer)
    weights = sum(part.token_weights for part in described)
    total = 2 * m.seq_length // p.cp * (3 * weights + recomputed_weights(described, recompute))
    repeated = 0 if p.sp else (p.tp - 1) * sum(part.whole_numel for part in described)  # on every tp rank
    total += 2 * m.seq_length // p.cp * (3 + recompute.full) * repeated
    total += 2 * config.dropped_chunks * config.row_tokens * weights
    passes = 2 + (4 if m.dropout else 5) + (2 if recompute.full or recompute.attention else 0)
    for core in (part for part in described if isinstance(part, AttentionSpec)):
        by_chunk = list(_computed_scores(config, core, cp_rank))
        scores = passes * sum(by_chunk) + 2 * sum(by_chunk[: config.dropped_chunks])
        total += 2 * core.heads // p.cp_heads * core.head_dim * scores
    return config.batch.micro * total // config.parallel.tp


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
    elif p.cp_keys == 1:
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
    for queries, keys in pairs:
        blocks = (block for spans in keys for block in mask_blocks(queries, spans, core.window, within, s))
        yield sum(
            (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
            for block in blocks
            for tile in tiles(block)
        )


def count_document_scores(lengths: Iterable[int], block_window: int | None) -> int:
    """Count the scores per head that are computed document by document. `block_window`: by which torch
    computes in blocks of queries; None for all scores at once.
    """
    return sum(count_scores(n, None if block_window is None else min(block_window, n)) for n in lengths)
