"""Best-fit decreasing of sequences into packs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megascale.layout.packs import pack_sequences


def test_the_fullest_pack_with_room_is_taken() -> None:
    assert pack_sequences([(5, 60), (1, 50), (0, 40), (7, 10)], 100) == [(5, 0), (1, 7)]
    assert pack_sequences([(0, 120), (1, 100), (2, 1)], 100) == [(0,), (1,), (2,)]


@given(lengths=st.lists(st.integers(1, 100), max_size=60), capacity=st.integers(100, 150))
def test_packs_hold_all_sequences_and_few_are_half_empty(lengths: list[int], capacity: int) -> None:
    ordered = sorted(enumerate(lengths), key=lambda sequence: -sequence[1])
    packs = pack_sequences(ordered, capacity)
    assert sorted(i for pack in packs for i in pack) == [*range(len(lengths))]
    tokens = [sum(lengths[i] for i in pack) for pack in packs]
    assert all(n <= capacity for n in tokens)
    assert sum(2 * n <= capacity for n in tokens) <= 1
