"""Every schedule is complete, free of deadlock, and has the cost of its formula."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.layout.stages import looped
from megascale.schedule.check import check_schedule
from megascale.schedule.gpipe import gpipe
from megascale.schedule.interleaved import interleaved_1f1b
from megascale.schedule.ir import Kind, build_schedule
from megascale.schedule.one_f_one_b import one_f_one_b
from megascale.schedule.zero_bubble import interleaved_zb
from tests.schedule.orders import schedule_of
from tests.schedule.units import simulate_schedule

STAGES, CHUNKS, MICRO_BATCHES = st.integers(1, 8), st.integers(1, 6), st.integers(1, 40)


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(p=STAGES, v=CHUNKS, m=MICRO_BATCHES)
def test_complete_and_free_of_deadlock(name: str, p: int, v: int, m: int) -> None:
    compute, placement = schedule_of(name, p, v, m)
    check_schedule(compute, placement, m)


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(p=STAGES, v=CHUNKS, m=MICRO_BATCHES)
def test_gradients_are_summed_in_the_order_of_the_micro_batches(name: str, p: int, v: int, m: int) -> None:
    """So all schedules have the same bits."""
    compute, _ = schedule_of(name, p, v, m)
    for order in compute:
        for chunk in range(v):
            summed = [action.microbatch for action in order if action.kind is Kind.B and action.chunk == chunk]
            assert summed == sorted(summed)


@given(p=STAGES, m=MICRO_BATCHES)
def test_gpipe_has_the_cost_of_its_formula(p: int, m: int) -> None:
    cost = simulate_schedule(build_schedule(gpipe, p, 1, m), looped(p, 1))
    assert cost.bubble == pytest.approx((p - 1) / m)
    assert cost.max_live == (m,) * p


@given(p=STAGES, m=MICRO_BATCHES)
def test_1f1b_has_the_cost_of_its_formula(p: int, m: int) -> None:
    cost = simulate_schedule(build_schedule(one_f_one_b, p, 1, m), looped(p, 1))
    assert cost.bubble == pytest.approx((p - 1) / m)
    assert cost.max_live == tuple(min(m, p - rank) for rank in range(p))


@given(p=STAGES, v=CHUNKS, m=MICRO_BATCHES)
def test_interleaved_costs_its_formula(p: int, v: int, m: int) -> None:
    cost = simulate_schedule(build_schedule(interleaved_1f1b, p, v, m), looped(p, v))
    if m >= p:  # also if p does not divide m
        assert cost.bubble == pytest.approx((p - 1) / (v * m))
    if m % p == 0 and v > 1:
        assert cost.max_live == tuple(min(v * m, (v - 1) * p + 2 * (p - rank - 1) + 1) for rank in range(p))


@given(p=STAGES, m=MICRO_BATCHES)
def test_interleaved_with_one_chunk_is_1f1b(p: int, m: int) -> None:
    assert build_schedule(interleaved_1f1b, p, 1, m) == build_schedule(one_f_one_b, p, 1, m)


@pytest.mark.parametrize(("p", "m", "seconds"), [(4, 8, 27), (8, 16, 55)])
def test_split_backwards_fill_the_bubble(p: int, m: int, seconds: float) -> None:
    """ZB-H1 in the simulator: a bubble of p - 1 instead of 3 (p - 1) units, at most p micro-batches on any rank."""
    cost = simulate_schedule(build_schedule(interleaved_zb, p, 1, m), looped(p, 1))
    assert cost.time == seconds == 3 * m + p - 1
    assert max(cost.max_live) <= p
