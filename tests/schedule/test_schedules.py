"""Every schedule is complete, free of deadlock, and has the cost of its formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.layout.stages import looped
from megascale.schedule.building_blocks import BuildingBlock, half_block, min_block, repeated, squeezed
from megascale.schedule.check import check_schedule
from megascale.schedule.gpipe import gpipe
from megascale.schedule.interleaved import interleaved_1f1b
from megascale.schedule.ir import build_schedule, most_live
from megascale.schedule.one_f_one_b import one_f_one_b
from tests.schedule.orders import schedule_of
from tests.schedule.units import simulate_schedule

STAGES, CHUNKS, MICRO_BATCHES = st.integers(1, 8), st.integers(1, 6), st.integers(1, 40)


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(p=STAGES, v=CHUNKS, m=MICRO_BATCHES)
@settings(max_examples=10)
def test_complete_and_free_of_deadlock(name: str, p: int, v: int, m: int) -> None:
    """With gradients in the order of the micro-batches, and no more of these live than the card says."""
    compute, placement = schedule_of(name, p, v, m)
    check_schedule(compute, placement, m, SCHEDULES[name].facts)


@pytest.mark.parametrize("name", SCHEDULES.names())
@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (5, 3), (8, 2)])
def test_peaks_of_cards_are_reached(name: str, p: int, v: int) -> None:
    for m in (4 * p, 4 * p + 1):
        compute, placement = schedule_of(name, p, v, m)
        live = max(most_live(order, [1] * placement.v) for order in compute)
        assert live == SCHEDULES[name].facts["peak"](p, placement.v, m)


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


DESIGN = [
    ("gpipe", 1, 33, 69, lambda p, m: m),
    ("1f1b", 1, 33, 69, lambda p, m: p),
    ("interleaved_1f1b", 2, 28.5, 58.5, lambda p, m: p + (p - 1) / 2),
    ("combined_1f1b", 2, 28.5, 58.5, lambda p, m: 1.5 * p),
    ("zb_h1", 1, 27, 55, lambda p, m: p),
    ("interleaved_zb", 2, 25.5, 51.5, lambda p, m: p),
    ("interleaved_zb", 4, 24.75, 49.75, lambda p, m: p),
    ("zb_v", 2, 25.5, 51.5, lambda p, m: p),
    ("dualpipev", 2, 27, 55, lambda p, m: p + 0.5),
]
"""Schedule, chunks, time of p4 m8 and of p8 m16, and most live micro-batches; forward, I and W of a rank take 1."""


@pytest.mark.parametrize(("name", "v", "small", "large", "peak"), DESIGN)
def test_times_and_peaks_of_the_design(
    name: str, v: int, small: float, large: float, peak: Callable[[int, int], float]
) -> None:
    for p, m, time in ((4, 8, small), (8, 16, large)):
        cost = simulate_schedule(*schedule_of(name, p, v, m))
        assert cost.time / v == time
        assert max(cost.max_live) / v == peak(p, m)


@pytest.mark.parametrize(
    ("name", "pair", "time"),
    [
        ("dualpipev", 1.0, 103), ("dualpipev", 0.8, 86.8), ("dualpipev", 0.7, 78.7),
        ("combined_1f1b", 1.0, 106.5), ("combined_1f1b", 0.8, 90.0), ("combined_1f1b", 0.7, 81.75),
        ("interleaved_1f1b", 0.7, 106.5),
    ],
)  # fmt: skip
def test_pairs_that_hide_the_exchange_of_experts(name: str, pair: float, time: float) -> None:
    """Eight ranks and 32 micro-batches; a pair takes the share `pair` of its parts."""
    assert simulate_schedule(*schedule_of(name, 8, 2, 32), pair=pair).time / 2 == pytest.approx(time)


@pytest.mark.parametrize(
    ("name", "v", "times"),
    [
        ("1f1b", 1, {0.0: 117, 0.05: 120.4, 0.1: 123.8}),
        ("interleaved_1f1b", 2, {0.0: 106.5, 0.05: 108, 0.1: 109.5}),
        ("interleaved_zb", 2, {0.0: 99.5, 0.05: 101.3, 0.1: 103.1}),
        ("interleaved_zb", 4, {0.0: 97.75, 0.05: 100.4, 0.1: 103.0, 0.2: 120.6}),
        ("zb_v", 2, {0.0: 99.5, 0.05: 101.2, 0.1: 102.8}),
        ("dualpipev", 2, {0.0: 103, 0.05: 106.6, 0.1: 110.7}),
    ],
)
def test_messages_that_are_exposed(name: str, v: int, times: dict[float, float]) -> None:
    """Eight ranks and 32 micro-batches; messages take a share of a rank's forward."""
    for message, time in times.items():
        cost = simulate_schedule(*schedule_of(name, 8, v, 32), message=message * v)
        assert cost.time / v == pytest.approx(time, abs=0.051)


@pytest.mark.parametrize(("name", "share"), [("v_half", 1 / 2), ("v_min", 2 / 3)])
@given(p=st.integers(2, 12), m=st.integers(0, 12))
@settings(max_examples=15)
def test_bubbles_of_building_blocks(name: str, share: float, p: int, m: int) -> None:
    """At most a share of 1F1B's bubble, from 2 p micro-batches on."""
    m += 2 * p
    cost = simulate_schedule(*schedule_of(name, p, 2, m))
    assert cost.time / 2 <= 3 * m + share * 3 * (p - 1)


@pytest.mark.parametrize("block", [half_block, min_block])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 8, 12])
def test_building_blocks_repeat(block: Callable[[int], BuildingBlock], p: int) -> None:
    """A long schedule is a short one with its steady micro-batch repeated."""
    few, many = squeezed(block(p), p, 2 * p + 4), squeezed(block(p), p, 3 * p + 9)
    assert many == [repeated(order, p, 3 * p + 9 - (2 * p + 4)) for order in few]
