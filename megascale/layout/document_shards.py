"""Shards of rows of packed documents, where ranks exchange keys and attention stays within documents.

Chunks of a row then have unequal work: it grows with the square of a document's length. Two ways to cut, of which
`RowSharding` takes for every micro-batch the one whose busiest rank has less to compute (WLB-LLM, Wang et al. 2025):

    row         a chunk near the head of the row and one near its tail (`layout.sequence_shard`)
    document    such chunks of every document; the fewer than 2 x ranks tokens left of each fill the ranks in turn

Chunks of documents have equal scores, but may be short, and a kernel computes whole blocks of `TILE` queries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megascale.config.model import ModelConfig
from megascale.config.parallel import ParallelConfig
from megascale.config.sparse_pattern import Reach, SparsePattern
from megascale.layout.sequence_shard import (
    SequenceShard,
    Spans,
    TokenSpan,
    count,
    cut,
    join,
    sequence_shard,
    split_over_heads,
    within_documents,
)
from megascale.layout.windows import score_windows

TILE = 128  # queries that an attention kernel computes at a time (flash-attn's blocks on Hopper)


@dataclass(frozen=True)
class RowSharding:
    """The shards of a context-parallel rank: `row` of rows, or `by` documents: "sequence", "document" or "auto".
    `heads`: ranks that exchange heads; `windows`: how many layers with scores have each window.
    """

    row: SequenceShard
    heads: int
    windows: Mapping[Reach | None, int]
    by: str

    def shard(self, starts: Sequence[Sequence[int]] | None) -> SequenceShard:
        """Return the shard of a micro-batch. `starts`: the positions at which the documents of each of its rows begin,
        with a document mask.
        """
        if self.by == "sequence" or starts is None or len(starts) > 1 or len(starts[0]) == 1:
            return self.row
        keys = len(self.row.parts) // self.heads
        document = shard_documents(starts[0], self.row.length, keys, self.heads, self.row.index)
        if self.by == "document":
            return document
        return min(self.row, document, key=lambda shard: max(self.work(shard, starts[0])))

    def work(self, shard: SequenceShard, starts: Sequence[int]) -> list[int]:
        """Count the scores per head of all layers, for each group of ranks that exchange heads."""

        def count_all(queries: Spans) -> int:
            counts = (n * computed_scores(queries, starts, shard.length, window) for window, n in self.windows.items())
            return sum(counts)

        return [count_all(shard.joined(first, self.heads)) for first in range(0, len(shard.parts), self.heads)]


def row_sharding(
    parallel: ParallelConfig, model: ModelConfig, fp8: Mapping[str, Any] | None, cp_rank: int
) -> RowSharding | None:
    """Return the sharding of a context-parallel rank; None without context parallelism. `fp8`: facts of the recipe of
    FP8 GEMMs.
    """
    row = sequence_shard(parallel, model.seq_length, cp_rank)
    if row is None:
        return None
    blocks = fp8 is not None and fp8["token_run"] and not fp8["free_borders"]  # a block has consecutive tokens
    by = "sequence" if parallel.cp_keys == 1 or blocks else parallel.cp_sharding
    return RowSharding(row, parallel.cp_heads, Counter(score_windows(model)), by)


def shard_documents(starts: Sequence[int], length: int, keys: int, heads: int, index: int) -> SequenceShard:
    """Return the shard of rank `index` of keys x heads ranks, by document."""
    chunks, rest = [list[TokenSpan]() for _ in range(keys)], list[TokenSpan]()
    for start, stop in pairwise((*starts, length)):
        size = (stop - start) // (2 * keys)
        rest.append(TokenSpan(start + 2 * keys * size, stop))
        for rank in range(keys) if size else ():
            places = (start + place * size for place in (rank, 2 * keys - 1 - rank))
            chunks[rank] += [TokenSpan(place, place + size) for place in places]
    share = count(rest) // keys
    wholes = [join(sorted([*chunks[rank], *cut(rest, rank * share, (rank + 1) * share)])) for rank in range(keys)]
    return SequenceShard(length, split_over_heads(wholes, heads), index)


def computed_scores(queries: Spans, starts: Sequence[int], length: int, window: Reach | None) -> int:
    """Count the scores of queries with all keys of their documents, in whole blocks of queries."""
    total = 0
    for start, spans in zip(starts, within_documents(queries, starts, length), strict=True):
        for span in spans:
            scores = _scores_before(span.stop - start, window) - _scores_before(span.start - start, window)
            total += scores * -(-span.size // TILE) * TILE // span.size
    return total


def _scores_before(place: int, window: Reach | None) -> int:
    """Count the scores of the first queries of a document, up to a place in it."""
    if isinstance(window, SparsePattern):
        return round(window.count_scores(place)[1] + place / 2)
    near = place if window is None else min(place, window)
    return near * (near + 1) // 2 + (place - near) * near
