"""The order of samples without ranges that are left out."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megascale.data.mix.skipped_ranges import below, order_index, read_before

EDGES = st.lists(st.integers(0, 60), max_size=8, unique=True).map(sorted)


def ranges(edges: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(edges))[::2]


@given(EDGES)
def test_samples_are_the_order_without_the_ranges(edges: list[int]) -> None:
    skipped = ranges(edges)
    left = [index for index in range(200) if not any(start <= index < stop for start, stop in skipped)]
    assert [order_index(position, skipped) for position in range(100)] == left[:100]
    assert [read_before(position, skipped) for position in range(100)] == [0, *(index + 1 for index in left[:99])]


@given(EDGES, EDGES, st.integers(0, 80))
def test_a_run_may_change_ranges_that_it_has_not_come_to(old: list[int], new: list[int], position: int) -> None:
    """Equal parts below what was read mean that the samples read so far are the same, in both orders."""
    end = read_before(position, ranges(old))
    if below(end, ranges(old)) == below(end, ranges(new)):
        read = [order_index(index, ranges(old)) for index in range(position)]
        assert read == [order_index(index, ranges(new)) for index in range(position)]
    else:
        assert end > min([*old, *new])


def test_parts_of_ranges_below_an_end() -> None:
    assert below(25, [(0, 5), (10, 20), (22, 30), (40, 50)]) == [(0, 5), (10, 20), (22, 25)]
