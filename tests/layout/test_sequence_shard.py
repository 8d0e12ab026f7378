"""Shards of a sequence: every position once, equal tokens, balanced work. MaskBlocks hold the visible scores alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.layout.document_shards import shard_documents
from megascale.layout.mask_blocks import MaskBlock, mask_blocks
from megascale.layout.sequence_shard import SequenceShard, TokenSpan, count, cut, divides_evenly, join, shard_sequence
from tests.layout.scores import visible_scores

GRIDS = [(1, 1), (1, 4), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3), (4, 2)]


def positions(spans: tuple[TokenSpan, ...]) -> list[int]:
    return [position for span in spans for position in range(*span)]


@pytest.mark.parametrize(("keys", "heads"), GRIDS)
def test_ranks_share_the_positions_equally(keys: int, heads: int) -> None:
    shards = [shard_sequence(48, keys, heads, rank) for rank in range(keys * heads)]
    assert {shard.size for shard in shards} == {48 // (keys * heads)}
    assert sorted(itertools.chain(*(positions(shard.spans) for shard in shards))) == list(range(48))
    for group in range(keys):  # the ranks that exchange heads hold pieces of one shard, in order
        joined = shards[0].joined(group * heads, heads)
        assert positions(joined) == [p for s in shards[group * heads : (group + 1) * heads] for p in positions(s.spans)]


def test_chunks_near_the_head_meet_chunks_near_the_tail() -> None:
    assert shard_sequence(16, 2, 2, 0).parts == (
        (TokenSpan(0, 4),),
        (TokenSpan(12, 16),),
        (TokenSpan(4, 8),),
        (TokenSpan(8, 12),),
    )
    assert shard_sequence(16, 4, 1, 1).spans == (TokenSpan(2, 4), TokenSpan(12, 14))
    assert shard_sequence(16, 1, 4, 2).spans == (TokenSpan(8, 12),)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 96])
def test_causal_work_is_balanced(ranks: int) -> None:
    """No rank has more than 1.1 times the mean of the scores (the bound of long-context training); with one chunk a
    rank the last would have almost twice the mean.
    """
    length = ranks * 96
    parts = shard_sequence(length, ranks, 1, 0).parts
    whole = (TokenSpan(0, length),)
    work = [sum(visible_scores(band) for band in mask_blocks(part, whole, None)) for part in parts]
    assert sum(work) == length * (length + 1) // 2
    assert max(work) <= 1.1 * sum(work) / ranks
    plain = mask_blocks((TokenSpan(length - 96, length),), whole, None)
    assert sum(visible_scores(band) for band in plain) > 1.3 * sum(work) / ranks


def test_what_divides() -> None:
    assert divides_evenly(12, 2, 1)
    assert not divides_evenly(10, 2, 1)  # half chunks
    assert divides_evenly(10, 1, 2)
    assert not divides_evenly(12, 2, 4)


def test_spans_are_cut_and_joined() -> None:
    spans = (TokenSpan(0, 4), TokenSpan(10, 14))
    assert cut(spans, 2, 7) == (TokenSpan(2, 4), TokenSpan(10, 13))
    assert cut(spans, 0, 8) == spans
    assert cut(spans, 4, 6) == (TokenSpan(10, 12),)
    assert join([TokenSpan(0, 4), TokenSpan(4, 6), TokenSpan(8, 9)]) == (TokenSpan(0, 6), TokenSpan(8, 9))
    assert count(spans) == 8


def test_a_rank_of_a_ring_computes_one_rectangle_a_step() -> None:
    """Two chunks against two chunks are a triangle, or a rectangle that is visible as a whole."""
    parts = shard_sequence(48, 4, 1, 0).parts
    for rank, mine in enumerate(parts):
        for source, theirs in enumerate(parts):
            (band,) = mask_blocks(mine, theirs, None)
            assert (band.left, band.right) == (None, 0 if source == rank else None)


def painted(bands: list[MaskBlock], rows: int, queries: int, keys: int) -> np.ndarray:
    """Count how often the bands compute each score [rows, queries, keys]."""
    scores = np.zeros((rows, queries, keys), dtype=int)
    for band in bands:
        n, m = band.queries.stop - band.queries.start, band.keys.stop - band.keys.start
        place = np.arange(m) - np.arange(n)[:, None] - band.offset
        visible = np.ones((n, m), dtype=bool)
        visible &= True if band.right is None else place <= band.right
        visible &= True if band.left is None else place >= -band.left
        assert visible.any(0).all(), "every key of a band is seen"
        assert visible.any(1).all(), "every query of a band sees a key"
        assert visible.sum() == visible_scores(band)
        scores[band.rows, band.queries, band.keys] += visible
    return scores


@settings(max_examples=60)
@given(
    st.sampled_from(GRIDS),
    st.sampled_from([None, 1, 2, 5, 13, 48]),
    st.lists(st.integers(1, 47), max_size=4),
    st.data(),
)
def test_bands_are_the_visible_scores(
    grid: tuple[int, int], window: int | None, cuts: list[int], data: st.DataObject
) -> None:
    keys, heads = grid
    starts = None if not cuts else [[0, *sorted(set(cuts))], [0]]
    shard: SequenceShard = shard_sequence(48, keys, heads, 0)
    if starts and data.draw(st.booleans()):
        shard = shard_documents(starts[0], 48, keys, heads, 0)
    mine, theirs = (data.draw(st.sampled_from(shard.parts)) for _ in range(2))
    bands = mask_blocks(mine, theirs, window, starts, 48)
    q, k = np.array(positions(mine)), np.array(positions(theirs))
    past = q[:, None] - k
    expected = np.stack([(past >= 0) & (past < (window or 48))] * 2)
    for row, begins in enumerate(starts or []):
        documents = np.searchsorted(begins, np.arange(48), side="right")
        expected[row] &= documents[q][:, None] == documents[k]
    assert np.array_equal(painted(bands, 2, len(q), len(k)), expected)
