"""Chunks of sequences: every token once, in order, within the limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megascale.layout.sequence_chunks import SequencePiece, cut_chunks


@given(lengths=st.lists(st.integers(1, 700), min_size=1, max_size=30), chunk=st.integers(16, 100))
def test_chunks_are_all_tokens_in_order(lengths: list[int], chunk: int) -> None:
    entries = cut_chunks(lengths, chunk)
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
