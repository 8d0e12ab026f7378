"""Wavefronts of a schedule: nothing before what it needs, and those of a few micro-batches are those of many."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.plan.wavefronts import Numbers, Program, Wavefronts, program, wavefronts
from megascale.schedule.ir import Order, backward, forward
from megascale.schedule.runs import ByRank, one_by_one, runs_of

Drawn = tuple[str, int, int, int, bool]


@st.composite
def drawn(draw: st.DrawFn, groups: int) -> Drawn:
    """Schedule, p, v, m and whether each backward's gradients are reduced."""
    name = draw(st.sampled_from(sorted(SCHEDULES.cards)))
    chunks = SCHEDULES[name].facts["chunks"]
    p = draw(st.integers(2 if chunks else 1, 9))
    v = draw(st.integers(2, 4)) if chunks else 1
    return name, p, v, draw(st.integers(1, groups * p)), draw(st.booleans())


def made(name: str, p: int, v: int, m: int, each: bool) -> Program:
    piles = SCHEDULES[name].facts["piles"]
    return program(
        partial(runs_of, SCHEDULES[name].load(), p, v), p, v, m, piles=piles, repeats=True, reduces_each=each
    )


@given(drawn(8))
def test_nothing_comes_before_what_it_needs(drawn: Drawn) -> None:
    name, p, v, m, each = drawn
    compute = SCHEDULES[name].load()(p, v, m)
    fronts = wavefronts(runs_of(SCHEDULES[name].load(), p, v, m), p, v, reduces_each=each)
    assert len(fronts.rank) == 2 * p * v * m
    front = np.repeat(np.arange(len(fronts.edges) - 1), np.diff(fronts.edges))
    sent = fronts.source < len(front)
    sends, gets = fronts.places.sends[fronts.place], fronts.places.gets[fronts.place]
    assert (front[fronts.source[sent]] < front[sent]).all() and sends[fronts.source[sent]].all()
    assert np.array_equal(gets, sent) and sends.sum() == sent.sum() == (2 * (p * v - 1) * m if p > 1 else 0)
    assert fronts.reduces.sum() == p * v * (m if each else 1) and fronts.opens.sum() == p * v
    for rank, order in enumerate(compute):
        own = fronts.rank == rank
        done = zip(fronts.place[own] // 2 - rank * v, fronts.micro_batch[own], fronts.place[own] % 2, strict=True)
        assert [backward(c, i) if back else forward(c, i) for c, i, back in done] == order
        assert (np.diff(front[own]) > 0).all()


@settings(max_examples=60)
@given(drawn(25))
def test_the_wavefronts_of_a_few_are_those_of_many(drawn: Drawn) -> None:
    name, p, v, m, each = drawn
    few, all = made(*drawn), wavefronts(runs_of(SCHEDULES[name].load(), p, v, m), p, v, reduces_each=each)
    fronts, count = few.fronts, 0
    sender = np.full(len(fronts.rank) + 1, len(all.rank))  # who has left a result at each place
    for front, source in gone_through(few):
        here = slice(*fronts.edges[front : front + 2])
        there = slice(count, count := count + here.stop - here.start)
        for column in ("rank", "place", "opens", "reduces"):
            assert np.array_equal(getattr(fronts, column)[here], getattr(all, column)[there]), column
        assert np.array_equal(sender[source], all.source[there])
        sender[here] = range(there.start, there.stop)
    assert count == len(all.rank)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("name", SCHEDULES.names())
def test_a_few_are_few(name: str, each: bool) -> None:
    chunks = SCHEDULES[name].facts["chunks"]
    for p in range(2 if chunks else 1, 9):
        for v in range(2, 5) if chunks else [1]:
            for m in range(1, 30 * p, 1 + p // 3):
                few = made(name, p, v, m, each)
                most = 11 * p if chunks else p + 3
                assert len(few.fronts.rank) <= 2 * p * v * min(m, most), (p, v, m)


def test_a_schedule_that_does_not_repeat_itself_is_gone_through_whole() -> None:
    def ever_longer(m: int) -> ByRank:
        order, begun = Order(), 0
        while begun < m:
            some = range(begun, min(m, 2 * begun + 1))
            order += [*(forward(0, i) for i in some), *(backward(0, i) for i in some)]
            begun = some.stop
        return one_by_one([order])

    found = program(ever_longer, 1, 1, 40, piles=False, repeats=True, reduces_each=False)
    assert found.windows == () and len(found.fronts.rank) == 80


def gone_through(few: Program) -> Iterator[tuple[int, Numbers]]:
    """Wavefronts, and what their actions need."""
    fronts, at = few.fronts, 0
    for window in few.windows:
        yield from plainly(fronts, at, window.end)
        for _ in range(window.left):
            offset = fronts.edges[window.start]
            for front in range(window.start, window.end):
                yield front, window.source[fronts.edges[front] - offset : fronts.edges[front + 1] - offset]
        at = window.end
    yield from plainly(fronts, at, len(fronts.edges) - 1)


def plainly(fronts: Wavefronts, start: int, end: int) -> Iterator[tuple[int, Numbers]]:
    for front in range(start, end):
        yield front, fronts.source[fronts.edges[front] : fronts.edges[front + 1]]


def test_a_schedule_that_does_not_end_is_said() -> None:
    stuck = [[backward(0, 0), forward(0, 0)], [forward(0, 0), backward(0, 0)]]
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] wait for each other"):
        wavefronts(one_by_one(stuck), 2, 1, reduces_each=False)
