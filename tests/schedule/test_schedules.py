"""Every schedule, for all (p, v, m), is complete, free of deadlock, and has the cost of its formula."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.schedule import ir
from megascale.schedule.check import ScheduleError, check_complete, check_messages
from megascale.schedule.dependencies import ScheduleDependencies
from megascale.schedule.gpipe import gpipe
from megascale.schedule.interleaved import interleaved_1f1b
from megascale.schedule.ir import Kind, backward, forward, forwards_only
from megascale.schedule.lower import lower, place_receives
from megascale.schedule.one_f_one_b import one_f_one_b
from tests.schedule.units import simulate_schedule

STAGES, CHUNKS, MICRO_BATCHES = st.integers(1, 8), st.integers(1, 6), st.integers(1, 40)


def shape(name: str, p: int, v: int, m: int) -> tuple[int, int, int]:
    """Return (p, v, m), with v = 1 for schedules with one chunk."""
    return p, v if SCHEDULES[name].facts["multi_chunk"] else 1, m


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(p=STAGES, v=CHUNKS, m=MICRO_BATCHES)
def test_complete_and_free_of_deadlock(name: str, p: int, v: int, m: int) -> None:
    p, v, m = shape(name, p, v, m)
    schedule = ir.build_schedule(SCHEDULES[name].load(), p, v, m)
    check_complete(schedule, v, m)
    simulate_schedule(schedule, v)


@given(p=STAGES, m=MICRO_BATCHES)
def test_gpipe_has_the_cost_of_its_formula(p: int, m: int) -> None:
    cost = simulate_schedule(ir.build_schedule(gpipe, p, 1, m), 1)
    assert cost.bubble == pytest.approx((p - 1) / m)
    assert cost.max_live == (m,) * p


@given(p=STAGES, m=MICRO_BATCHES)
def test_1f1b_has_the_cost_of_its_formula(p: int, m: int) -> None:
    cost = simulate_schedule(ir.build_schedule(one_f_one_b, p, 1, m), 1)
    assert cost.bubble == pytest.approx((p - 1) / m)
    assert cost.max_live == tuple(min(m, p - rank) for rank in range(p))


@given(p=STAGES, v=CHUNKS, m=MICRO_BATCHES)
def test_interleaved_costs_its_formula(p: int, v: int, m: int) -> None:
    cost = simulate_schedule(ir.build_schedule(interleaved_1f1b, p, v, m), v)
    if m >= p:  # also if p does not divide m
        assert cost.bubble == pytest.approx((p - 1) / (v * m))
    if m % p == 0 and v > 1:
        assert cost.max_live == tuple(min(v * m, (v - 1) * p + 2 * (p - rank - 1) + 1) for rank in range(p))


@given(p=STAGES, m=MICRO_BATCHES)
def test_interleaved_with_one_chunk_is_1f1b(p: int, m: int) -> None:
    assert ir.build_schedule(interleaved_1f1b, p, 1, m) == ir.build_schedule(one_f_one_b, p, 1, m)


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(p=STAGES, v=CHUNKS, m=MICRO_BATCHES, ahead=st.integers(0, 3))
def test_messages_arrive_in_order_and_none_waits_for_ever(name: str, p: int, v: int, m: int, ahead: int) -> None:
    p, v, m = shape(name, p, v, m)
    compute = ir.build_schedule(SCHEDULES[name].load(), p, v, m)
    check_messages(lower(compute, v, lookahead=ahead))
    check_messages(lower(forwards_only(compute), v, lookahead=ahead, training=False))


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(p=STAGES, v=CHUNKS, m=st.integers(1, 20), ahead=st.integers(0, 3))
def test_receives_are_posted_for_the_actions_that_follow(name: str, p: int, v: int, m: int, ahead: int) -> None:
    """Except for p = 2, with activations and gradients on the same channel, in the order of the sender."""
    p, v, m = shape(name, p, v, m)
    compute = ir.build_schedule(SCHEDULES[name].load(), p, v, m)
    kinds = {Kind.RECV_F: Kind.F, Kind.RECV_B: Kind.B}
    for rank, lowered in enumerate(lower(compute, v, lookahead=ahead)):
        posts = place_receives(ScheduleDependencies(compute, v), rank, ahead)
        assert [a for a in lowered if a.kind in kinds] == [receive for post in posts for receive in post]
        for index, post in enumerate(posts if p != 2 else []):
            served = [receive._replace(kind=kinds[receive.kind]) for receive in post]
            assert set(served) <= set(compute[rank][index : index + ahead + 1])


@pytest.mark.parametrize("each", [False, True])
@given(p=STAGES, v=CHUNKS, m=MICRO_BATCHES)
def test_gathers_and_reductions_stand_where_they_must(each: bool, p: int, v: int, m: int) -> None:
    for order in lower(ir.build_schedule(interleaved_1f1b, p, v, m), v, reduce_each=each):
        for chunk in range(v):
            chunk_actions = [action for action in order if action.chunk == chunk]
            kinds = [action.kind for action in chunk_actions]
            assert kinds.count(Kind.WAIT_PARAMS) == 1
            assert kinds.index(Kind.WAIT_PARAMS) < kinds.index(Kind.F)
            last_backward = len(kinds) - 1 - kinds[::-1].index(Kind.B)
            reductions = [index for index, kind in enumerate(kinds) if kind is Kind.REDUCE]
            assert len(reductions) == (m if each else 1)
            assert reductions[-1] > last_backward


def test_lowering_sends_every_boundary_once() -> None:
    p, v, m = 4, 3, 8
    lowered = lower(ir.build_schedule(interleaved_1f1b, p, v, m), v)
    counts = [sum(action.kind is kind for order in lowered for action in order) for kind in Kind]
    by_kind = dict(zip(Kind, counts, strict=True))
    boundaries = m * (p * v - 1)
    assert {by_kind[kind] for kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)} == {boundaries}


# ---- the checks detect faulty schedules -----------------------------------------------------------------------------


def test_a_missing_backward_is_detected() -> None:
    schedule = ir.build_schedule(one_f_one_b, 2, 1, 4)
    schedule[1].remove(backward(0, 3))
    with pytest.raises(ScheduleError, match="rank 1"):
        check_complete(schedule, 1, 4)


def test_a_backward_before_its_forward_is_detected() -> None:
    with pytest.raises(ScheduleError, match=r"B0\.0"):
        check_complete([[backward(0, 0), forward(0, 0)]], 1, 1)


def test_a_deadlock_is_detected() -> None:
    schedule = ir.build_schedule(one_f_one_b, 2, 1, 2)
    schedule[0] = [forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)]
    schedule[1] = [forward(0, 1), backward(0, 1), forward(0, 0), backward(0, 0)]
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate_schedule(schedule, 1)


def test_receives_out_of_order_are_detected() -> None:
    lowered = lower(ir.build_schedule(gpipe, 2, 1, 2), 1)
    receives = [index for index, action in enumerate(lowered[1]) if action.kind is Kind.RECV_F]
    first, second = receives
    lowered[1][first], lowered[1][second] = lowered[1][second], lowered[1][first]
    with pytest.raises(ScheduleError):
        check_messages(lowered)


def test_a_message_that_is_never_sent_is_detected() -> None:
    lowered = lower(ir.build_schedule(one_f_one_b, 2, 1, 2), 1)
    lowered[0] = [action for action in lowered[0] if action.kind is not Kind.SEND_F]
    with pytest.raises(ScheduleError, match="deadlock"):
        check_messages(lowered)
