"""Pieces say what the actions are, and what is awaited while each runs."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.plan import orders as orders_of
from megascale.plan.orders import Done, Orders, Piece, done
from megascale.schedule.check import dependencies
from megascale.schedule.ir import Action, Kind
from megascale.schedule.lower import AHEAD, receives
from megascale.schedule.precedence import Precedence
from megascale.schedule.runs import runs_of


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(p=st.integers(1, 6), v=st.integers(1, 4), m=st.integers(1, 30), ahead=st.integers(0, 3))
def test_pieces_say_what_the_actions_are_and_what_they_await(name: str, p: int, v: int, m: int, ahead: int) -> None:
    v = v if SCHEDULES[name].facts["chunks"] else 1
    function = SCHEDULES[name].load()
    orders, precedence = Orders(runs_of(function, p, v, m), p, v), Precedence(function(p, v, m), v)
    for rank, order in enumerate(precedence.compute):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(orders_of, "FEW", math.inf)
            pieces = orders.of(rank, ahead)
        found = [
            (done(number), awaited)
            for piece in pieces
            for _ in range(piece.times)
            for number, awaited in zip(piece.numbers, piece.awaited, strict=True)
        ]
        posted = accumulate(map(len, receives(precedence, rank, ahead)))
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


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(p=st.integers(3, 6), v=st.integers(1, 4), m=st.integers(1, 30))
def test_of_many_actions_a_few_receives_count_too_early(name: str, p: int, v: int, m: int) -> None:
    v = v if SCHEDULES[name].facts["chunks"] else 1
    function = SCHEDULES[name].load()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders_of, "FEW", math.inf)
        exact = Orders(runs_of(function, p, v, m), p, v)
        expected = [awaited(exact.of(rank, AHEAD)) for rank in range(p)]
        patch.setattr(orders_of, "FEW", 0)
        short = Orders(runs_of(function, p, v, m), p, v)
        found = [awaited(short.of(rank, AHEAD)) for rank in range(p)]
    for ours, theirs in zip(found, expected, strict=True):
        more = [one - other for one, other in zip(ours, theirs, strict=True)]
        most = 3 if v == 1 or m > 2 else 4 * v
        assert min(more) >= 0 and sum(more) <= (most if v == 1 or m < 2 * p else 0)


def awaited(pieces: list[Piece]) -> list[int]:
    return [count for piece in pieces for _ in range(piece.times) for count in piece.awaited]


def test_pieces_are_few() -> None:
    orders = Orders(runs_of(SCHEDULES["1f1b"].load(), 8, 1, 10**9), 8, 1)
    assert all(len(orders.of(rank, 2)) < 16 for rank in range(8))
