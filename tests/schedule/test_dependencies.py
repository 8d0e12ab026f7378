"""Dependencies of actions, and the messages that follow from them."""

from __future__ import annotations

import pytest

from megascale.layout.stages import Placement, looped, v_shaped
from megascale.schedule.dependencies import Neighbours, dependencies, neighbours, results
from megascale.schedule.ir import Action, Kind, backward, forward

PLACEMENTS = [looped(1, 1), looped(3, 1), looped(2, 3), looped(5, 2), v_shaped(1, 2), v_shaped(3, 2)]


def test_what_actions_need() -> None:
    ring = looped(2, 2)  # rank 1: stages 1 and 3
    assert dependencies(forward(0, 7), 0, ring) == []
    assert dependencies(forward(1, 7), 1, ring) == [(Kind.F, 2, 7)]
    assert dependencies(backward(1, 7), 1, ring) == [(Kind.F, 3, 7)]
    assert dependencies(backward(0, 7), 1, ring) == [(Kind.F, 1, 7), (Kind.I, 2, 7)]
    assert dependencies(Action(Kind.I, 0, 7), 1, ring) == [(Kind.F, 1, 7), (Kind.I, 2, 7)]
    assert dependencies(Action(Kind.W, 0, 7), 1, ring) == [(Kind.I, 1, 7)]
    assert dependencies(Action(Kind.R, 0, 7), 1, ring) == [(Kind.F, 1, 7)]


def test_a_backward_leaves_what_its_halves_leave() -> None:
    line = looped(3, 1)
    halves = [result for kind in (Kind.I, Kind.W) for result in results(Action(kind, 0, 2), 1, line)]
    assert results(backward(0, 2), 1, line) == halves


def test_neighbours_on_a_ring_and_on_a_v() -> None:
    ring, v = looped(3, 2), v_shaped(3, 2)
    assert neighbours(forward(0, 1), 2, ring) == neighbours(Action(Kind.SEND_F, 0, 1), 2, ring) == Neighbours(1, 3)
    assert neighbours(backward(1, 1), 0, ring) == neighbours(Action(Kind.I, 1, 1), 0, ring) == Neighbours(4, 2)
    assert neighbours(forward(0, 1), 2, v) == Neighbours(1, None)  # stage 3 is on rank 2, too
    assert neighbours(forward(1, 1), 0, v) == Neighbours(4, None)
    for kind in (Kind.W, Kind.R):
        assert neighbours(Action(kind, 0, 1), 1, ring) == Neighbours(None, None)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_each_end_of_a_message_names_the_other(placement: Placement) -> None:
    for kind in (Kind.F, Kind.B):
        for stage, (rank, chunk) in enumerate(placement.places):
            target = neighbours(Action(kind, chunk, 0), rank, placement).target
            if target is not None:
                receiver, its_chunk = placement.places[target]
                action = Action(kind, its_chunk, 0)
                assert receiver != rank and neighbours(action, receiver, placement).source == stage
                left = results(Action(kind, chunk, 0), rank, placement)
                assert {*left} & {*dependencies(action, receiver, placement)}
