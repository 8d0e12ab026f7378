"""The check of schedules finds missing, repeated and misplaced actions, and deadlocks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.layout.stages import looped, v_shaped
from megascale.schedule.check import check_schedule
from megascale.schedule.ir import Action, Kind, Overlap, Schedule, ScheduleError, backward, build_schedule, forward
from megascale.schedule.one_f_one_b import one_f_one_b
from megascale.schedule.zero_bubble import interleaved_zb
from tests.schedule.orders import any_order


def faulty(schedule: Schedule, rank: int, remove: Action, add: Action | None = None) -> Schedule:
    order = schedule[rank]
    at = order.index(remove)
    order[at : at + 1] = [] if add is None else [add]
    return schedule


@given(p=st.integers(1, 4), m=st.integers(1, 3), split=st.booleans(), chance=st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_any_order_of_all_actions_passes(p: int, m: int, split: bool, chance: random.Random) -> None:
    for placement in (looped(p, 2), v_shaped(p, 2)):
        check_schedule(any_order(placement, m, chance, split=split, ascending=True), placement, m)


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        (backward(0, 3), None, r"rank 1 runs F0\.3 for chunk 0 and micro-batch 3, not F, then B"),
        (forward(0, 3), backward(0, 3), r"rank 1 runs B0\.3 B0\.3 for"),
        (forward(0, 3), forward(0, 4), r"rank 1: F0\.4 is none of 1 chunks and 4 micro-batches"),
        (backward(0, 3), Action(Kind.I, 0, 3), r"rank 1 runs F0\.3 I0\.3 for"),
        (backward(0, 3), Action(Kind.W, 0, 3), r"rank 1 runs F0\.3 W0\.3 for"),
    ],
)
def test_an_incomplete_schedule_is_refused(removed: Action, added: Action | None, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_schedule(faulty(build_schedule(one_f_one_b, 2, 1, 4), 1, removed, added), looped(2, 1), 4)


def test_a_backward_before_its_forward_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 runs B0\.0 F0\.0 for"):
        check_schedule([[backward(0, 0), forward(0, 0)]], looped(1, 1), 1)


def test_ranks_that_wait_for_each_other_are_refused() -> None:
    stuck = [[forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1)] for _ in range(2)]
    stuck[0].insert(1, stuck[0].pop(2))  # F0 B0 F1 B1
    with pytest.raises(ScheduleError, match=r"deadlocks: rank 0 at B0\.0, rank 1 at F0\.1"):
        check_schedule(stuck, looped(2, 1), 2)


def test_split_backwards_pass() -> None:
    check_schedule(build_schedule(interleaved_zb, 4, 1, 6), looped(4, 1), 6)


def test_schedules_with_other_sums_or_more_activations_are_refused() -> None:
    late = [[forward(0, 0), forward(0, 1), backward(0, 1), backward(0, 0)]]
    with pytest.raises(ScheduleError, match=r"rank 0: B0\.0 comes after that of micro-batch 1"):
        check_schedule(late, looped(1, 1), 2)
    with pytest.raises(ScheduleError, match="rank 0 has 2 micro-batches live, more than 1"):
        check_schedule(build_schedule(one_f_one_b, 2, 1, 4), looped(2, 1), 4, {"peak": lambda p, v, m: 1})


@pytest.mark.parametrize("pair", [Overlap(forward(0, 1), backward(0, 1)), Overlap(backward(0, 0), forward(0, 1))])
def test_pairs_of_other_actions_are_refused(pair: Overlap) -> None:
    with pytest.raises(ScheduleError, match="is no forward with a backward of another micro-batch"):
        check_schedule([[forward(0, 0), pair, backward(0, 1)]], looped(1, 1), 2)


def test_pairs_pass() -> None:
    check_schedule([[forward(0, 0), Overlap(forward(0, 1), backward(0, 0)), backward(0, 1)]], looped(1, 1), 2)


@pytest.mark.parametrize(
    ("order", "found"), [(None, "NoneType"), ((forward(0, 0), backward(0, 0)), "tuple"), (["F0.0", 1], "int, str")]
)
def test_what_is_no_list_of_actions_is_refused(order: Any, found: str) -> None:
    with pytest.raises(ScheduleError, match=f"rank 0: {found}, not a list of Action and Overlap"):
        check_schedule([order], looped(1, 1), 1)
