"""Replays of schedules: bubbles equal the formulas, and overlapped communication is free."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.layout.stages import looped
from megascale.plan.simulate.event_simulator import Simulation, StageTimes, simulate
from megascale.plan.simulate.profiles import Overlaps
from megascale.record.events import COMPUTE
from megascale.schedule import ir
from megascale.schedule.ir import Action, Kind, ScheduleError, backward, forward
from megascale.schedule.lower import lower
from megascale.schedule.resharding import GATHERS, Reshard
from tests.schedule.orders import schedule_of

ALL, NONE = Overlaps(tp="all", pp=True, dp=True), Overlaps()
WORK = tuple(ir.COMPUTE_KINDS)


def times(p: int, v: int, **changes: Any) -> StageTimes:
    """Durations: a forward takes 1, a backward 2 in equal parts, everything else 0 unless given."""
    places = list(itertools.product(range(p), range(v)))
    values = {"message": 0.0, "receive": 0.0, "reduce": {}, "gather": {}, **changes}
    forward, backward = dict.fromkeys(places, 1.0), dict.fromkeys(places, 2.0)
    return StageTimes(forward, backward, **values, weight_gradient=forward)


def run(name: str, p: int, v: int, m: int, overlaps: Overlaps = ALL, **changes: Any) -> Simulation:
    compute = ir.build_schedule(SCHEDULES[name].load(), p, v, m)
    given = looped(p, v), times(p, v, **changes), overlaps
    recorded = simulate(compute, *given, spans=True)
    assert recorded.last == simulate(compute, *given).last, "spans change nothing"
    return recorded


@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from(["gpipe", "1f1b"]))
@settings(deadline=None, max_examples=40)
def test_the_bubble_is_p_minus_1_micro_batches(p: int, m: int, name: str) -> None:
    assert run(name, p, 1, m).last == pytest.approx(3 * (m + p - 1))


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_interleaving_divides_the_bubble(p: int, v: int, groups: int) -> None:
    m = groups * p
    assert run("interleaved_1f1b", p, v, m).last == pytest.approx(3 * (m * v + p - 1))


def test_messages_without_overlap_block_the_sender() -> None:
    """Two stages, one micro-batch: forward, message, forward and backward on the last stage, message, backward."""
    for overlaps in (ALL, NONE):
        assert run("1f1b", 2, 1, 1, overlaps, message=0.5).last == pytest.approx(6 + 2 * 0.5)
    hidden, shown = (run("interleaved_1f1b", 4, 2, 32, overlaps, message=0.1).last for overlaps in (ALL, NONE))
    assert shown - hidden > 32 * 2 * 0.1  # at every chunk of every micro-batch


def test_dp_collectives_overlap_with_other_chunks() -> None:
    p, v, m = 2, 4, 8
    places = list(itertools.product(range(p), range(v)))
    cost = {"reduce": dict.fromkeys(places, 0.5), "gather": dict.fromkeys(places, 0.25)}
    bare, hidden, shown = (
        run("interleaved_1f1b", p, v, m, overlaps, **more).last
        for overlaps, more in ((ALL, {}), (ALL, cost), (NONE, cost))
    )
    assert shown == pytest.approx(bare + v * 0.75)
    # exposed: the first all-gather, and at most the last reductions
    assert bare + 0.25 <= hidden <= bare + 0.25 + 2 * 0.5


def test_buckets_overlap_with_their_own_chunk() -> None:
    places = [(0, 0)]
    cost = {"reduce": dict.fromkeys(places, 1.0), "gather": dict.fromkeys(places, 0.5)}
    one_bucket, ten, slow = (
        run("1f1b", 1, 1, 2, **{**cost, **more}).last
        for more in ({}, {"buckets": {(0, 0): 10}}, {"buckets": {(0, 0): 10}, "reduce": {(0, 0): 30.0}})
    )
    assert one_bucket == pytest.approx(6 + 1.5)
    assert ten == pytest.approx(6 + 0.15)  # a bucket of either collective is exposed
    assert slow == pytest.approx(6 + 0.05 - 2 * 0.9 + 30)


@pytest.mark.parametrize("buckets", [1, 10])
def test_reductions_beside_compute_slow_it_down_in_any_number_of_buckets(buckets: int) -> None:
    cost = {"reduce": {(0, 0): 0.5}, "buckets": {(0, 0): buckets}}
    alone, slowed = (
        simulate([[forward(0, 0), backward(0, 0), forward(0, 1)]], looped(1, 1),
                 times(1, 1, **cost, slowdown=slowdown), ALL, reduce_each=True).last
        for slowdown in (0.0, 0.2)
    )  # fmt: skip
    assert slowed - alone == pytest.approx(0.2 * 0.5)


def test_messages_and_dp_share_a_link() -> None:
    p, v, m = 2, 4, 8
    places = list(itertools.product(range(p), range(v)))
    cost = {"reduce": dict.fromkeys(places, 3.0), "message": 0.4}
    alone, shared = (
        run("interleaved_1f1b", p, v, m, share_link=share_link, **cost).last for share_link in (False, True)
    )
    assert shared > alone


@pytest.mark.parametrize(("left", "shared"), [(0.0, 0.0), (0.1, 0.1), (0.4, 0.4), (2.0, 0.4)])
def test_a_shared_link_is_halved_while_both_send(left: float, shared: float) -> None:
    first = [forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1)]
    last = [forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)]
    cost = {"message": 0.4, "reduce": {(1, 0): 3 + left}, "share_link": True}
    recorded = simulate([first, last], looped(2, 1), times(2, 1, **cost), ALL, reduce_each=True, spans=True)
    sent = next(span for span in recorded.spans if span.action == Action(Kind.SEND_B, 0, 1))
    assert sent.end - sent.start == pytest.approx(0.4 + shared)
    reduced = next(span for span in recorded.spans if span.action == Action(Kind.REDUCE, 0, 1) and span.rank == 1)
    assert reduced.end - sent.start == pytest.approx(left + shared + 3 + left)


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b"]), st.integers(1, 4), st.integers(1, 3), st.floats(0, 3),
    st.floats(0, 3),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_overlap_is_never_slower(name: str, p: int, groups: int, message: float, reduce: float) -> None:
    v = 2 if name == "interleaved_1f1b" and p > 1 else 1
    name = name if v > 1 or name != "interleaved_1f1b" else "1f1b"
    cost = {"message": message, "reduce": dict.fromkeys(itertools.product(range(p), range(v)), reduce)}
    overlapped, exposed = (run(name, p, v, groups * p, overlaps, **cost).last for overlaps in (ALL, NONE))
    assert overlapped <= exposed + 1e-9
    assert overlapped >= run(name, p, v, groups * p).last - 1e-9


def test_spans_of_compute_do_not_overlap() -> None:
    recorded = run("1f1b", 2, 1, 4, message=0.1)
    for rank in range(2):
        compute = sorted((s for s in recorded.spans if s.rank == rank and s.row == "compute"), key=lambda s: s.start)
        assert len(compute) == 8
        assert all(before.end <= after.start + 1e-12 for before, after in itertools.pairwise(compute))
    assert max(span.end for span in recorded.spans) == recorded.last


@given(st.sampled_from(SCHEDULES.names()), st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.booleans())
@settings(deadline=None, max_examples=60)
def test_a_step_communicates_as_its_lowered_schedule(name: str, p: int, v: int, m: int, each: bool) -> None:
    """A rank's sends and reductions stand where lowering puts them; all-gathers keep the order of lowering, before the
    first forward of their chunk.
    """
    compute, placement = schedule_of(name, p, v, m)
    dp = dict.fromkeys(placement.places, 0.1)
    taken = times(p, placement.v, message=0.1, reduce=dp, gather=dp)
    recorded = simulate(compute, placement, taken, ALL, reduce_each=each, spans=True)
    for rank, order in enumerate(lower(compute, placement, reduce_each=each)):
        spans = [
            span
            for span in recorded.spans
            if span.rank == rank and (span.row == COMPUTE or span.action.kind not in WORK)
        ]
        gathers = {span.action.chunk: span for span in spans if span.action.kind is Kind.WAIT_PARAMS}
        expected = [action for action in ir.each_action(order) if action.kind not in (Kind.RECV_F, Kind.RECV_B)]
        assert [span.action for span in spans] == sorted(
            expected, key=lambda action: action.kind is not Kind.WAIT_PARAMS
        )
        for span in spans:
            assert span.action.kind is not Kind.F or gathers[span.action.chunk].end <= span.start


@given(
    st.sampled_from(SCHEDULES.names()), st.integers(1, 4), st.integers(1, 8), st.sampled_from(["keep", "microbatch"])
)
@settings(deadline=None, max_examples=60)
def test_sharded_weights_are_gathered_where_lowering_says(name: str, p: int, m: int, reshard: Reshard) -> None:
    """Before the first use of a chunk in the step, or in a run of its actions, which waits for it."""
    facts = SCHEDULES[name].facts
    compute, placement = schedule_of(name, p, 2, m)
    reshard = "keep" if facts.get("pairs") else reshard
    taken = times(p, placement.v, gather=dict.fromkeys(placement.places, 0.1))
    recorded = simulate(compute, placement, taken, ALL, reshard=reshard, spans=True)
    for rank, order in enumerate(lower(compute, placement, reshard=reshard)):
        spans = [span for span in recorded.spans if span.rank == rank and span.row in (COMPUTE, "dp")]
        gathers = {span.action: span for span in spans if span.action.kind in (Kind.GATHER_F, Kind.GATHER_B)}
        assert [*gathers] == [action for action in ir.each_action(order) if action.kind in GATHERS.values()]
        for kind, chunk, microbatch, *_ in gathers:
            work = [span for span in spans if span.row == COMPUTE and span.action[1:] == (chunk, microbatch)]
            used = min(span.start for span in work if GATHERS.get(span.action.kind) is kind)
            assert gathers[Action(kind, chunk, microbatch)].end <= used


def test_kept_weights_are_gathered_at_their_first_use() -> None:
    """A chunk's gather follows the action before it. With runs it is repeated."""
    first = [forward(0, 0), forward(1, 0), backward(1, 0), backward(0, 0)]
    cost = {"gather": {(0, 0): 0.5, (0, 1): 0.25}}
    given = [first], looped(1, 2), times(1, 2, **cost), ALL
    assert simulate(*given).last == pytest.approx(6 + 0.5)  # all at the step's start
    assert simulate(*given, reshard="keep").last == pytest.approx(6 + 0.75)
    assert simulate(*given, reshard="microbatch").last == pytest.approx(6 + 0.5 + 0.25 + 0.5)
    buckets = {"buckets": {(0, 0): 5, (0, 1): 5}, "slowdown": 0.25}
    streams = simulate([first], looped(1, 2), times(1, 2, **cost, **buckets), ALL, reshard="keep")
    assert streams.last == pytest.approx(6 + 0.75 * (0.2 + 0.25 * 0.8))
    shown = simulate(*given[:3], NONE, reshard="keep")
    assert shown.last == pytest.approx(6 + 0.75)


def test_a_gather_hides_in_the_wait_for_a_message() -> None:
    compute = ir.build_schedule(SCHEDULES["1f1b"].load(), 2, 1, 1)
    cost = {"gather": {(1, 0): 1.5}, "message": 0.5}
    given = compute, looped(2, 1), times(2, 1, **cost), ALL
    assert simulate(*given, reshard="keep").last == pytest.approx(6 + 2 * 0.5)


def test_a_deadlock_is_an_error() -> None:
    stuck = [[backward(0, 0), forward(0, 0)], [forward(0, 0), backward(0, 0)]]
    with pytest.raises(ScheduleError, match=r"ranks \[0, 1\] wait for each other"):
        simulate(stuck, looped(2, 1), times(2, 1), ALL)
