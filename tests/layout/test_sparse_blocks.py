"""Blocks of sparse attention: each visible score once and no other, all keys over the heads, and their number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megascale.config.sparse_pattern import SparsePattern
from megascale.layout.sequence_shard import Spans, TokenSpan, shard_sequence
from megascale.layout.sparse_blocks import HeadBlocks, visible_blocks
from tests.layout.sparse_masks import mask_of

PATTERNS = st.builds(SparsePattern, st.integers(1, 3), st.integers(2, 4), st.integers(1, 6))
LENGTH, ROWS = 48, 2


def places(spans: Spans) -> list[int]:
    return [position for span in spans for position in range(*span)]


def drawn(visible: tuple[HeadBlocks, ...], heads: int, queries: int, keys: int, row: int = 0) -> Tensor:
    """Count how often blocks show each score of a row, [heads, queries, keys]."""
    counts = torch.zeros(heads, queries, keys, dtype=torch.int64)
    for seen in visible:
        columns = torch.cat([torch.arange(keys)[part] for part in seen.keys or (slice(None),)])
        of_heads = torch.arange(heads)[seen.heads]
        for block in seen.blocks if row in range(ROWS)[seen.rows] else ():
            if block.row not in (None, row):
                continue
            n, m = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
            place = torch.arange(m) - (torch.arange(n)[:, None] + block.offset)
            shown = torch.ones(n, m, dtype=torch.bool)
            shown &= place >= -block.left if block.left is not None else shown
            shown &= place <= block.right if block.right is not None else shown
            at = of_heads[:, None, None], torch.arange(queries)[block.queries][:, None], columns[block.keys]
            counts[at] += shown
    return counts


@given(PATTERNS, st.integers(0, 5), st.integers(1, 5), st.sampled_from([(1, 1), (2, 1), (3, 2), (4, 1)]), st.data())
def test_blocks_show_each_visible_score_once(
    pattern: SparsePattern, first: int, heads: int, ranks: tuple[int, int], data: st.DataObject
) -> None:
    """For the queries of a rank with the keys of another, or with all, and for documents that begin anywhere."""
    begins = data.draw(st.lists(st.integers(1, LENGTH - 1), max_size=4, unique=True))
    starts = [(0, *sorted(begins)), (0,)] if begins else None
    shard = shard_sequence(LENGTH, *ranks, 0)
    mine, theirs = data.draw(st.sampled_from(shard.parts)), data.draw(st.sampled_from(shard.parts))
    theirs = data.draw(st.sampled_from([theirs, (TokenSpan(0, LENGTH),)]))
    numbers = range(first, first + heads)
    visible = visible_blocks(mine, theirs, pattern, numbers, starts, LENGTH)
    for row in range(ROWS):
        expected = mask_of(pattern, numbers, LENGTH, starts[row] if starts else (0,))
        counts = drawn(visible, heads, len(places(mine)), len(places(theirs)), row)
        assert torch.equal(counts, expected[:, places(mine)][:, :, places(theirs)].long())


@given(PATTERNS, st.integers(1, 60))
def test_heads_see_all_keys_together(pattern: SparsePattern, length: int) -> None:
    """Any `stride` heads in sequence do, so a group of as many query heads with the same keys does too."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    for first in (0, 1, 5):
        masks = mask_of(pattern, range(first, first + pattern.stride), length)
        assert torch.equal(masks.any(0), causal)


@given(PATTERNS, st.integers(1, 60))
def test_scores_are_counted_by_density(pattern: SparsePattern, length: int) -> None:
    """The mean over the heads of what the mask shows, where a query's own key counts half, as in n^2 / 2."""
    shown = mask_of(pattern, range(pattern.stride), length).sum().item() / pattern.stride
    full, causal = pattern.count_scores(length)
    assert causal == pytest.approx(shown - length / 2, abs=1e-9)
    local = min(length, pattern.local_blocks * pattern.block)
    assert full == pytest.approx(length * (local + (length - local) / pattern.stride))


@given(PATTERNS, st.integers(0, 40), st.integers(1, 40), st.integers(0, 30))
def test_a_window_or_none_shows_all_heads_the_same(pattern: SparsePattern, low: int, size: int, window: int) -> None:
    queries, keys = (TokenSpan(low, low + size),), (TokenSpan(0, 20),)
    for reach in (None, window + 1):
        visible = visible_blocks(queries, keys, reach, range(3))
        distance = torch.arange(low, low + size)[:, None] - torch.arange(20)
        expected = (distance >= 0) & (distance < (reach or 100))
        assert torch.equal(drawn(visible, 3, size, 20), expected.long().expand(3, -1, -1))
