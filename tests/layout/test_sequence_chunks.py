"""Chunks of sequences: every token once, in order, within the limit, for equal tokens or equal work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.layout.hybrid.sequence_work import SequenceWork
from megascale.layout.sequence_chunks import SequencePiece, cut_chunks, cut_evenly

WORK = SequenceWork(1.0, 0.01)


@given(lengths=st.lists(st.integers(1, 700), min_size=1, max_size=30), chunk=st.integers(16, 100), uneven=st.booleans())
def test_chunks_are_all_tokens_in_order(lengths: list[int], chunk: int, uneven: bool) -> None:
    entries = cut_chunks(lengths, chunk, WORK if uneven else None)
    pieces = [piece for entry in entries for own in entry for piece in own]
    for number, length in enumerate(lengths):
        own = [piece for piece in pieces if piece.sequence == number]
        assert [piece.start for piece in own] == [0, *(piece.stop for piece in own[:-1])]
        assert own[-1].stop == length
        assert len(own) == 1 or length > chunk
    for entry in entries:
        assert all(0 < sum(stop - start for _, start, stop in own) <= chunk for own in entry)
        assert len(entry) == 1 or {piece.sequence for own in entry for piece in own} == {entry[0][0].sequence}


def test_the_example_of_chunkflow() -> None:
    """Sequences of 1, 1, 2 and 4 units are four chunks of 2, two of them dependent."""
    entries = cut_chunks([1, 4, 2, 1], 2)
    assert [len(entry) for entry in entries] == [2, 1, 1]
    assert entries[0] == ((SequencePiece(1, 0, 2),), (SequencePiece(1, 2, 4),))
    assert entries[2] == ((SequencePiece(0, 0, 1), SequencePiece(3, 0, 1)),)


def test_chunks_of_equal_work_shrink() -> None:
    ends = cut_evenly(1000, 300, WORK)
    times = [WORK.chunk(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
    sizes = [stop - start for start, stop in zip([0, *ends], ends, strict=False)]
    assert times == pytest.approx([sum(times) / len(times)] * len(times), rel=0.02)
    assert sizes == sorted(sizes, reverse=True)
    even = cut_evenly(1000, 300)
    assert even == [250, 500, 750, 1000]
    even_times = [WORK.chunk(start, stop) for start, stop in zip([0, *even], even, strict=False)]
    assert max(even_times) > 1.5 * max(times)
