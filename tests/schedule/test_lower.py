"""Placement of receives: as early as requested, but never with a deadlock when a rank waits for its device."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.schedule import ir
from megascale.schedule.check import check_device_wait, check_messages
from megascale.schedule.dependencies import ScheduleDependencies
from megascale.schedule.ir import Kind, Schedule, forwards_only
from megascale.schedule.lower import RECV_LOOKAHEAD, lower, place_receives
from megascale.schedule.one_f_one_b import one_f_one_b
from tests.schedule.hosts import COMPUTE, any_order, ends, firsts, places

FAR = st.integers(0, 3)


def schedule_of(name: str, p: int, v: int, m: int) -> tuple[Schedule, int]:
    """Build a compute schedule, with one chunk if the schedule has only one; return the schedule and the chunks."""
    v = v if SCHEDULES[name].facts["multi_chunk"] else 1
    return ir.build_schedule(SCHEDULES[name].load(), p, v, m), v


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(p=st.integers(1, 8), v=st.integers(1, 6), m=st.integers(1, 30), ahead=FAR)
def test_any_rank_may_wait_for_its_device(name: str, p: int, v: int, m: int, ahead: int) -> None:
    compute, v = schedule_of(name, p, v, m)
    check_device_wait(lower(compute, v, lookahead=ahead, reduce_each=True), v)
    check_device_wait(lower(forwards_only(compute), v, lookahead=ahead, training=False), v)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), FAR, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_any_rank_may_wait_in_random_schedules(p: int, v: int, m: int, ahead: int, chance: random.Random) -> None:
    compute = any_order(p, v, m, chance)
    for orders in (compute, forwards_only(compute)):
        lowered = lower(orders, v, lookahead=ahead)
        check_messages(lowered)
        check_device_wait(lowered, v)


@pytest.mark.parametrize("name", [*SCHEDULES.names(), "any"])
@given(p=st.integers(2, 4), v=st.integers(1, 3), m=st.integers(1, 5), chance=st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None)
def test_simulated_hosts_that_wait_finish(name: str, p: int, v: int, m: int, chance: random.Random) -> None:
    """A single host before any action; and all hosts before the actions that load kernels in the first step."""
    compute, v = (any_order(p, v, m, chance), v) if name == "any" else schedule_of(name, p, v, m)
    lowered = lower(compute, v, lookahead=RECV_LOOKAHEAD)
    assert all(ends(lowered, v, {place}) for place in places(lowered))
    assert ends(lowered, v, firsts(lowered))


def test_simultaneous_waits_of_two_ranks_may_deadlock() -> None:
    """Both ranks have posted receives for later actions of the peer, as overlap requires."""
    lowered = lower(ir.build_schedule(one_f_one_b, 2, 1, 4), 1, lookahead=RECV_LOOKAHEAD)
    before = [lowered[0].index((Kind.F, 0, 2)), lowered[1].index((Kind.B, 0, 1))]
    first, second = enumerate(before)
    assert ends(lowered, 1, {first}) and ends(lowered, 1, {second})
    assert not ends(lowered, 1, {first, second})


@given(p=st.integers(2, 8), m=st.integers(1, 40))
def test_without_lookahead_all_ranks_may_wait_before_any_action(p: int, m: int) -> None:
    """Schedules with one chunk per rank."""
    for name in ("1f1b", "gpipe"):
        lowered = lower(schedule_of(name, p, 1, min(m, 60 // p))[0], 1, lookahead=0)
        assert ends(lowered, 1, places(lowered, COMPUTE))


def test_most_receives_are_posted_two_actions_ahead_and_none_earlier() -> None:
    precedence = ScheduleDependencies(ir.build_schedule(one_f_one_b, 4, 1, 16), 1)
    for rank in range(4):
        ahead = [
            precedence.index(rank)[Kind.F if kind is Kind.RECV_F else Kind.B, chunk, i] - place
            for place, post in enumerate(place_receives(precedence, rank, RECV_LOOKAHEAD))
            for kind, chunk, i in post
        ]
        assert max(ahead) == statistics.median(ahead) == 2


@pytest.mark.parametrize("name", SCHEDULES.names())
@given(p=st.integers(2, 8), v=st.integers(1, 6), m=st.integers(1, 40))
def test_all_but_a_few_receives_are_two_actions_ahead(name: str, p: int, v: int, m: int) -> None:
    """Exceptions: the end of warm-up, the drain, and groups hardly larger than the lookahead."""
    compute, v = schedule_of(name, p, v, m)
    precedence = ScheduleDependencies(compute, v)
    for rank in range(p):
        later = 0
        for place, post in enumerate(place_receives(precedence, rank, RECV_LOOKAHEAD)):
            for kind, chunk, i in post:
                needed = precedence.index(rank)[Kind.F if kind is Kind.RECV_F else Kind.B, chunk, i]
                later += place > max(0, needed - RECV_LOOKAHEAD)
        assert later <= 2 or (v > 1 and min(m, p) <= RECV_LOOKAHEAD)
