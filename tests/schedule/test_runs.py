"""Runs say what a schedule does, and are few."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.schedule.ir import Action, Schedule, backward, forward
from megascale.schedule.runs import Run, Runs, alternate, expanded, runs_of

LENGTHS = st.lists(st.integers(1, 9), max_size=6)


def in_runs(of: Callable[[int, int], Action], lengths: list[int]) -> Runs:
    """A chunk for each."""
    return [Run((of(chunk, 3 * chunk),), times) for chunk, times in enumerate(lengths)]


@given(LENGTHS, st.data(), st.integers(0, 70))
def test_forwards_and_backwards_alternate(lengths: list[int], data: st.DataObject, warmup: int) -> None:
    others = data.draw(st.permutations(lengths))
    forwards, backwards = in_runs(forward, lengths), in_runs(backward, others)
    rest = [*map(iter, (expanded(forwards), expanded(backwards)))]
    warmup = min(warmup, sum(lengths))
    expected = [next(rest[0]) for _ in range(warmup)]
    for action in rest[0]:
        expected += [action, next(rest[1])]
    found = alternate(forwards, backwards, warmup)
    assert expanded(found) == [*expected, *rest[1]]
    assert len(found) <= 2 * (len(lengths) + len(others))


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(p=st.integers(1, 8), v=st.integers(1, 6), m=st.integers(1, 40))
def test_a_schedule_is_its_runs(name: str, p: int, v: int, m: int) -> None:
    v = v if SCHEDULES[name].facts["chunks"] else 1
    schedule = SCHEDULES[name].load()
    runs = [*map(runs_of(schedule, p, v, m), range(p))]
    assert [expanded(each) for each in runs] == schedule(p, v, m)
    assert all(len(each) <= 4 * v * max(1, m // p) + 1 for each in runs)


def test_any_number_of_micro_batches_is_as_short() -> None:
    for name in SCHEDULES.names():
        runs = runs_of(SCHEDULES[name].load(), 8, 1, 10**9)
        assert all(len(runs(rank)) <= 3 for rank in range(8))


def test_a_schedule_that_is_not_written_in_runs() -> None:
    def forwards(p: int, v: int, m: int) -> Schedule:
        return [[forward(0, i) for i in range(rank, m)] for rank in range(p)]

    assert runs_of(forwards, 2, 1, 3)(1) == [Run((forward(0, i),)) for i in (1, 2)]
    assert SCHEDULES["1f1b"].load().__doc__.startswith("Orders of p ranks")
