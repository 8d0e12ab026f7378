"""Shards by document: every position once, equal tokens, balanced work. Rows are cut so where it is less work."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.layout import document_shards
from megascale.layout.document_shards import TILE, RowSharding, computed_scores, shard_documents
from megascale.layout.mask_blocks import mask_blocks
from megascale.layout.sequence_shard import TokenSpan, shard_sequence, within_documents
from tests.layout.scores import visible_scores

GRIDS = [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3)]


def sharding(length: int, keys: int, heads: int = 1, by: str = "auto") -> RowSharding:
    return RowSharding(shard_sequence(length, keys, heads, 0), heads, {None: 1}, by)


def starts_of(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths[:-1])]


@given(st.sampled_from(GRIDS), st.lists(st.integers(1, 71), max_size=9))
def test_ranks_share_the_positions_equally(grid: tuple[int, int], cuts: list[int]) -> None:
    starts = [0, *sorted(set(cuts))]
    parts = shard_documents(starts, 72, *grid, 0).parts
    assert {sum(span.size for span in part) for part in parts} == {72 // len(parts)}
    places = [place for part in parts for span in part for place in range(*span)]
    assert sorted(places) == list(range(72))
    for part in parts:
        assert all(before.stop < after.start for before, after in itertools.pairwise(part))


def test_of_every_document_a_chunk_near_the_head_and_one_near_the_tail() -> None:
    first, second = shard_documents([0, 9], 16, 2, 1, 0).parts  # documents of 9 and 7 tokens, of which 1 and 3 are left
    assert first == (TokenSpan(0, 2), TokenSpan(6, 10), TokenSpan(12, 14))
    assert second == (TokenSpan(2, 6), TokenSpan(10, 12), TokenSpan(14, 16))


def test_what_is_in_each_document() -> None:
    spans = [TokenSpan(1, 5), TokenSpan(8, 9)]
    assert within_documents(spans, [0, 2, 6], 9) == [[TokenSpan(1, 2)], [TokenSpan(2, 5)], [TokenSpan(8, 9)]]


@given(st.lists(st.integers(1, 95), max_size=5), st.sampled_from([None, 1, 7, 200]))
def test_scores_are_those_of_the_bands(cuts: list[int], window: int | None) -> None:
    starts, whole = [0, *sorted(set(cuts))], (TokenSpan(0, 96),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_shards, "TILE", 1)
        for queries in shard_sequence(96, 4, 1, 0).parts:
            visible = sum(visible_scores(band) for band in mask_blocks(queries, whole, window, [starts], 96))
            assert computed_scores(queries, starts, 96, window) == visible


LONG_TAIL = [20_000, 300, 1000, 4000, 700, 50, 1500, 2000, 3218]
"""Documents of a row of 2^15 tokens."""


@pytest.mark.parametrize(("keys", "heads"), [(4, 1), (8, 1), (4, 2)])
def test_by_document_the_work_is_balanced(keys: int, heads: int) -> None:
    rows, starts = sharding(1 << 15, keys, heads), starts_of(LONG_TAIL)
    documents = shard_documents(starts, 1 << 15, keys, heads, 0)
    by_row, by_document = (rows.work(shard, starts) for shard in (rows.row, documents))
    assert max(by_document) <= 1.1 * sum(by_document) / keys
    assert max(by_row) > 1.3 * sum(by_row) / keys
    assert rows.shard([starts]) == documents


@pytest.mark.parametrize(
    ("starts", "by"),
    [
        (None, "auto"), ([[0]], "document"), ([[0, 5], [0]], "auto"), ([[0, 500]], "sequence"),
        ([[*range(0, 1024, 64)]], "auto"),
    ],
    ids=["no documents", "one document", "two rows", "by sequence", "chunks shorter than a tile"],
)  # fmt: skip
def test_where_rows_are_cut(starts: Any, by: str) -> None:
    rows = sharding(1024, 4, by=by)
    assert rows.shard(starts) == rows.row
    if starts and by == "auto" and len(starts) == 1:
        chunks = rows.work(shard_documents(starts[0], 1024, 4, 1, 0), starts[0])
        assert TILE > 64 // 8 and max(chunks) > max(rows.work(rows.row, starts[0]))
