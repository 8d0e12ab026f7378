"""Which keys the queries of a sliding window see, block by block of queries."""

from __future__ import annotations

BLOCK = 192
"""Queries of a sliding window that are computed together. Each costs window + BLOCK keys instead of window, so fewer
are better, but from 192 on torch's kernel for CPUs works on 64 queries at a time instead of 32.
"""


def scores(s: int, window: int | None) -> int:
    """Count the scores that a head forms of a sequence: all of them, or block by block of queries."""
    blocks = [(slice(0, s), slice(0, s))] if window is None else spans(s, window)
    return sum((queries.stop - queries.start) * (keys.stop - keys.start) for queries, keys in blocks)


def spans(s: int, window: int, block: int = BLOCK) -> list[tuple[slice, slice]]:
    """The queries of each block, at most `block` of s, and the keys that any of them sees."""
    firsts = range(0, s, min(block, s))
    queries = [slice(first, min(first + block, s)) for first in firsts]
    return [(block, slice(max(0, block.start + 1 - window), block.stop)) for block in queries]
