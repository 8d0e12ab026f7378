"""`check_device_wait` agrees with a simulation of hosts and devices."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.schedule import ir
from megascale.schedule.check import ScheduleError, check_device_wait
from megascale.schedule.ir import Action, Kind, RankSchedule, Schedule
from megascale.schedule.lower import lower
from megascale.schedule.one_f_one_b import one_f_one_b
from tests.schedule.hosts import COMPUTE, RECEIVES, any_order, ends, places

LETTERS = {"F": Kind.F, "B": Kind.B}


@given(
    st.integers(2, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.randoms(use_true_random=False)
)  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_the_proof_agrees_with_the_simulation(p: int, v: int, m: int, ahead: int, chance: random.Random) -> None:
    lowered = [eager(order, ahead) for order in lower(any_order(p, v, m, chance), v, lookahead=0)]
    assert ends(lowered, v, set())
    assert proved(lowered, v) == all(ends(lowered, v, {place}) for place in places(lowered))


def proved(schedule: Schedule, v: int) -> bool:
    try:
        check_device_wait(schedule, v)
    except ScheduleError:
        return False
    return True


def eager(order: RankSchedule, ahead: int) -> RankSchedule:
    """Post every receive `ahead` compute actions earlier."""
    results, starts = RankSchedule(), list[int]()  # index to insert a receive before a compute action
    waiting = RankSchedule()
    for action in order:
        if action.kind in RECEIVES:
            waiting.append(action)
            continue
        if action.kind in COMPUTE:
            starts.append(len(results))
            at = starts[max(0, len(starts) - 1 - ahead)]
            results[at:at] = waiting
            starts = [start + len(waiting) * (start >= at) for start in starts]
            waiting = []
        results.append(action)
    return results


@pytest.mark.parametrize(("p", "m", "places_that_hang"), [(2, 16, 2), (4, 8, 6), (8, 16, 14)])
def test_receives_always_two_actions_ahead_would_deadlock(p: int, m: int, places_that_hang: int) -> None:
    """1F1B with every receive two actions ahead of its consumer, and a wait before a compute action."""
    lowered = [eager(order, 2) for order in lower(ir.build_schedule(one_f_one_b, p, 1, m), 1, lookahead=0)]
    with pytest.raises(ScheduleError, match=r"before F0\.\d+, never continues: a receive from rank"):
        check_device_wait(lowered, 1)
    hang = [place for place in places(lowered, COMPUTE) if not ends(lowered, 1, {place})]
    assert len(hang) == places_that_hang


def test_a_send_whose_receive_is_posted_too_late_would_deadlock() -> None:
    """Rank 1 sends the result of F1.1 to rank 2, which consumes it after B0.0. B0.0 depends, through rank 0, on B1.0 of
    rank 1, and rank 1 may wait for the send before B1.0.
    """
    orders = [
        "F0.1 F0.0 F1.0 F1.1 B1.0 B0.0 B1.1 B0.1",
        "F0.0 F0.1 F1.0 F1.1 B1.0 B0.0 B1.1 B0.1",
        "F0.0 F0.1 F1.0 B1.0 B0.0 F1.1 B1.1 B0.1",
    ]
    lowered = lower([[*map(read, order.split())] for order in orders], 2, lookahead=0)
    receive, before = Action(Kind.RECV_F, 1, 1), lowered[1].index((Kind.B, 1, 0))
    check_device_wait(lowered, 2)
    assert ends(lowered, 2, {(1, before)})
    assert lowered[2].index(receive) < lowered[2].index((Kind.B, 0, 0))

    lowered[2].remove(receive)
    lowered[2].insert(lowered[2].index((Kind.F, 1, 1)), receive)
    with pytest.raises(ScheduleError, match=r"rank 1, .* before B1\.0, never continues: a send to rank 2"):
        check_device_wait(lowered, 2)
    assert not ends(lowered, 2, {(1, before)})


def read(text: str) -> Action:
    chunk, microbatch = text[1:].split(".")
    return Action(LETTERS[text[0]], int(chunk), int(microbatch))


def test_a_deadlock_of_compute_actions_is_detected() -> None:
    stuck = [[read("B0.0"), read("F0.0")], [read("F0.0"), read("B0.0")]]
    with pytest.raises(ScheduleError, match="deadlock"):
        check_device_wait(lower(stuck, 1), 1)


def test_a_send_apart_from_its_action_is_detected() -> None:
    lowered = lower(ir.build_schedule(one_f_one_b, 2, 1, 2), 1)
    at = lowered[1].index((Kind.SEND_B, 0, 0))
    lowered[1][at : at + 2] = reversed(lowered[1][at : at + 2])
    with pytest.raises(ScheduleError, match=r"SEND_B0\.0 does not directly follow"):
        check_device_wait(lowered, 1)
