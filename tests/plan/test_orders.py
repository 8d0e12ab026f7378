"""Pieces say what the actions are, and what is awaited while each runs."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.plan.orders import Done, Orders, done
from megascale.schedule.check import dependencies
from megascale.schedule.ir import Action, Kind
from megascale.schedule.lower import receives
from megascale.schedule.runs import runs_of


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(p=st.integers(1, 6), v=st.integers(1, 4), m=st.integers(1, 40), ahead=st.integers(0, 3))
def test_pieces_say_what_the_actions_are_and_what_they_await(name: str, p: int, v: int, m: int, ahead: int) -> None:
    v = v if SCHEDULES[name].facts["chunks"] else 1
    function = SCHEDULES[name].load()
    orders, schedule = Orders(runs_of(function, p, v, m), p, v), function(p, v, m)
    for rank, order in enumerate(schedule):
        pieces = orders.of(rank, ahead)
        found = [
            (done(number), awaited)
            for piece in pieces
            for _ in range(piece.times)
            for number, awaited in zip(piece.numbers, piece.awaited, strict=True)
        ]
        posted = accumulate(map(len, receives(schedule, rank, v, ahead)))
        needed = accumulate(waits(action, rank, p, v) for action in order)
        assert found == [
            (Done(action.chunk, action.kind is Kind.B, action.microbatch == 0), there - own)
            for action, there, own in zip(order, posted, needed, strict=True)
        ]
        assert orders.of(rank, ahead) is pieces


def waits(action: Action, rank: int, p: int, v: int) -> bool:
    """Whether it needs what another rank has done."""
    own = action.chunk * p + rank
    return p > 1 and any(stage != own for _, stage, _ in dependencies(action, rank, p, v))


def test_pieces_are_few() -> None:
    orders = Orders(runs_of(SCHEDULES["1f1b"].load(), 8, 1, 10**9), 8, 1)
    assert all(len(orders.of(rank, 2)) < 16 for rank in range(8))
