"""`ScheduleDependencies.last_predecessors`, computed along two paths, equals the definition."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from megascale.schedule import ir
from megascale.schedule.check import dependencies
from megascale.schedule.dependencies import ScheduleDependencies
from megascale.schedule.ir import Action, Kind, Schedule, backward, forward
from megascale.schedule.one_f_one_b import one_f_one_b
from tests.schedule.hosts import any_order

Place = tuple[int, int]


@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 2), st.randoms(use_true_random=False))
def test_last_predecessors_equal_the_definition(p: int, v: int, m: int, chance: random.Random) -> None:
    compute = any_order(p, v, m, chance)
    precedence, before = ScheduleDependencies(compute, v), predecessors(compute, v)
    for at, order in enumerate(compute):
        for of in {at - 1, at + 1} & {*range(p)} if v == 1 else {(at - 1) % p, (at + 1) % p}:
            expected = [
                max([i for rank, i in before[at, index] if rank == of], default=-1) for index in range(len(order))
            ]
            assert precedence.last_predecessors(of, at) == expected


def predecessors(compute: Schedule, v: int) -> dict[Place, set[Place]]:
    """Return all predecessors of every action, by the definition."""
    p = len(compute)
    where = {
        (kind, chunk * p + rank, i): (rank, index)
        for rank, order in enumerate(compute)
        for index, (kind, chunk, i) in enumerate(order)
    }
    results: dict[Place, set[Place]] = {}

    def find(place: Place) -> set[Place]:
        if place not in results:
            rank, index = place
            previous = [(rank, index - 1)] if index else []
            needs = previous + [where[need] for need in dependencies(compute[rank][index], rank, p, v)]
            results[place] = set(needs).union(*map(find, needs))
        return results[place]

    for place in where.values():
        find(place)
    return results


def test_producer_and_consumer() -> None:
    line, ring = ScheduleDependencies(ir.build_schedule(one_f_one_b, 3, 1, 2), 1), ScheduleDependencies([[], [], []], 2)
    assert (
        line.producer(forward(0, 1), 0) is line.consumer(backward(0, 1), 0) is line.producer(backward(0, 1), 2) is None
    )
    assert line.consumer(forward(0, 1), 0) == (1, Action(Kind.F, 0, 1))
    assert ring.consumer(forward(0, 1), 2) == (0, Action(Kind.F, 1, 1))
    assert ring.producer(backward(0, 1), 2) == (0, Action(Kind.B, 1, 1))
    assert ScheduleDependencies([[]], 2).consumer(forward(0, 0), 0) is None
