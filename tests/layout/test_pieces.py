"""Runs of rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megascale.layout.pieces import pieces_of


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_runs_cover_all_rows_once_in_order_and_evenly(rows: int, pieces: int) -> None:
    runs = pieces_of(rows, pieces)
    assert [row for run in runs for row in range(rows)[run]] == list(range(rows))
    assert len(runs) == min(rows, pieces)
    lengths = {run.stop - run.start for run in runs}
    assert not lengths or (min(lengths) > 0 and max(lengths) - min(lengths) <= 1)
