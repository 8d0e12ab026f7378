"""Counts of the scores of attention in blocks."""

from __future__ import annotations

from megascale.layout.mask_blocks import MaskBlock


def visible_scores(block: MaskBlock) -> int:
    """Count the visible scores of a block."""
    n, m = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
    if block.left is None and block.right is None:
        return n * m
    total = 0
    for query in range(n):
        low = 0 if block.left is None else max(0, query + block.offset - block.left)
        high = m - 1 if block.right is None else min(m - 1, query + block.offset + block.right)
        total += high - low + 1
    return total
