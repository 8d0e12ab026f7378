"""The pieces of a collective: slices of its rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megascale.layout.pieces import split_rows


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_slices_cover_all_rows_once_in_order_and_evenly(rows: int, pieces: int) -> None:
    slices = split_rows(rows, pieces)
    assert [row for piece in slices for row in range(rows)[piece]] == list(range(rows))
    assert len(slices) == min(rows, pieces)
    lengths = {piece.stop - piece.start for piece in slices}
    assert not lengths or (min(lengths) > 0 and max(lengths) - min(lengths) <= 1)
