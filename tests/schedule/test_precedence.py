"""The last action of a neighbour that an action follows from, found along two paths, is the last of all."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from megascale.schedule import ir
from megascale.schedule.check import dependencies
from megascale.schedule.ir import Action, Kind, Schedule, backward, forward
from megascale.schedule.one_f_one_b import one_f_one_b
from megascale.schedule.precedence import Precedence
from tests.schedule.hosts import any_order

Place = tuple[int, int]


@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 2), st.randoms(use_true_random=False))
def test_it_is_the_last_of_all_predecessors(p: int, v: int, m: int, chance: random.Random) -> None:
    compute = any_order(p, v, m, chance)
    precedence, before = Precedence(compute, v), predecessors(compute, v)
    for at, order in enumerate(compute):
        for of in {at - 1, at + 1} & {*range(p)} if v == 1 else {(at - 1) % p, (at + 1) % p}:
            expected = [
                max([i for rank, i in before[at, index] if rank == of], default=-1) for index in range(len(order))
            ]
            assert precedence.last(of, at) == expected


def predecessors(compute: Schedule, v: int) -> dict[Place, set[Place]]:
    """All of each, by the definition."""
    p = len(compute)
    where = {
        (kind, chunk * p + rank, i): (rank, index)
        for rank, order in enumerate(compute)
        for index, (kind, chunk, i) in enumerate(order)
    }
    found: dict[Place, set[Place]] = {}

    def find(place: Place) -> set[Place]:
        if place not in found:
            rank, index = place
            own = [(rank, index - 1)] if index else []
            needs = own + [where[need] for need in dependencies(compute[rank][index], rank, p, v)]
            found[place] = set(needs).union(*map(find, needs))
        return found[place]

    for place in where.values():
        find(place)
    return found


def test_where_inputs_come_from_and_results_go() -> None:
    line, ring = Precedence(ir.schedule(one_f_one_b, 3, 1, 2), 1), Precedence([[], [], []], 2)
    assert line.source(forward(0, 1), 0) is line.target(backward(0, 1), 0) is line.source(backward(0, 1), 2) is None
    assert line.target(forward(0, 1), 0) == (1, Action(Kind.F, 0, 1))
    assert ring.target(forward(0, 1), 2) == (0, Action(Kind.F, 1, 1))
    assert ring.source(backward(0, 1), 2) == (0, Action(Kind.B, 1, 1))
    assert Precedence([[]], 2).target(forward(0, 0), 0) is None
