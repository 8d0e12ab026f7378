"""The windows of layers, and sliding-window attention in blocks of queries: the keys visible to every block."""

from __future__ import annotations

from megascale.config.model import ModelConfig
from megascale.config.sparse_pattern import Reach

QUERY_BLOCK = 192
"""Queries per block. A query costs window + QUERY_BLOCK keys instead of window, which favours small blocks; but from
192 queries on, torch's CPU kernel processes 64 queries at a time instead of 32.
"""


def count_scores(s: int, window: int | None) -> int:
    """Count the attention scores per head of a sequence of length s, computed at once or in blocks of queries."""
    blocks = [(slice(0, s), slice(0, s))] if window is None else window_blocks(s, window)
    return sum((queries.stop - queries.start) * (keys.stop - keys.start) for queries, keys in blocks)


def window_blocks(s: int, window: int, block: int = QUERY_BLOCK) -> list[tuple[slice, slice]]:
    """Split s queries into blocks of at most `block`. Returns (queries, visible keys) of every block."""
    firsts = range(0, s, min(block, s))
    queries = [slice(first, min(first + block, s)) for first in firsts]
    return [(block, slice(max(0, block.start + 1 - window), block.stop)) for block in queries]


def score_windows(model: ModelConfig) -> tuple[Reach | None, ...]:
    """Return the `windows` of the layers with scores of queries and keys, which linear attention has not."""
    operations = (model.attention_kind(layer).facts["operations"] for layer in range(model.total_layers))
    return tuple(window for window, used in zip(model.windows, operations, strict=True) if "attention" in used)
