"""The replay of a schedule: bubbles are those of the formulas, and what is hidden costs nothing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.catalog.schedules import SCHEDULES
from megascale.schedule import ir
from megascale.schedule.ir import Action, Kind, backward, forward
from megascale.schedule.lower import lower
from megascale.simulate.event_simulator import Replay, Times, compiled, replay
from megascale.simulate.profiles import Hides

ALL, NONE = Hides(tp="all", pp=True, dp=True), Hides()


def times(p: int, v: int, **changes: Any) -> Times:
    """A forward of each chunk takes 1, its backward 2, and all else nothing."""
    places = list(itertools.product(range(p), range(v)))
    values = {"message": 0.0, "hops": 0.0, "reduce": {}, "gather": {}, **changes}
    return Times(dict.fromkeys(places, 1.0), dict.fromkeys(places, 2.0), **values)


def run(name: str, p: int, v: int, m: int, hides: Hides = ALL, **changes: Any) -> Replay:
    program = compiled(lower(ir.schedule(SCHEDULES[name].load(), p, v, m), v, ahead=2), v)
    found = replay(program, times(p, v, **changes), hides, spans=True)
    assert found.end == replay(program, times(p, v, **changes), hides).end, "spans change nothing"
    return found


@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from(["gpipe", "1f1b"]))
@settings(deadline=None, max_examples=40)
def test_a_pipeline_is_idle_as_long_as_its_other_stages_take(p: int, m: int, name: str) -> None:
    assert run(name, p, 1, m).last == pytest.approx(3 * (m + p - 1))


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_interleaving_divides_the_bubble(p: int, v: int, groups: int) -> None:
    m = groups * p
    assert run("interleaved_1f1b", p, v, m).last == pytest.approx(3 * (m * v + p - 1))


def test_a_message_that_is_not_hidden_costs_its_sender() -> None:
    """Two stages, one micro-batch: a forward, its message, the other's forward and backward, a message, a backward."""
    for hides in (ALL, NONE):
        assert run("1f1b", 2, 1, 1, hides, message=0.5).last == pytest.approx(6 + 2 * 0.5)
    hidden, shown = (run("interleaved_1f1b", 4, 2, 32, hides, message=0.1).last for hides in (ALL, NONE))
    assert shown - hidden > 32 * 2 * 0.1  # at every chunk of every micro-batch


def test_collectives_of_dp_hide_behind_other_chunks() -> None:
    p, v, m = 2, 4, 8
    places = list(itertools.product(range(p), range(v)))
    cost = {"reduce": dict.fromkeys(places, 0.5), "gather": dict.fromkeys(places, 0.25)}
    bare, hidden, shown = (
        run("interleaved_1f1b", p, v, m, hides, **more).last for hides, more in ((ALL, {}), (ALL, cost), (NONE, cost))
    )
    assert shown == pytest.approx(bare + v * 0.75)
    # of the first chunk that is gathered, and of the last that is reduced
    assert bare + 0.25 <= hidden <= bare + 0.25 + 2 * 0.5


def test_buckets_hide_behind_their_own_chunk() -> None:
    places = [(0, 0)]
    cost = {"reduce": dict.fromkeys(places, 1.0), "gather": dict.fromkeys(places, 0.5)}
    one, ten, slow = (
        run("1f1b", 1, 1, 2, **{**cost, **more}).last
        for more in ({}, {"buckets": {(0, 0): 10}}, {"buckets": {(0, 0): 10}, "reduce": {(0, 0): 30.0}})
    )
    assert one == pytest.approx(6 + 1.5)
    assert ten == pytest.approx(6 + 0.15)  # of each the one that nothing hides
    assert slow == pytest.approx(6 + 0.05 - 2 * 0.9 + 30)


def test_messages_and_dp_share_a_way() -> None:
    p, v, m = 2, 4, 8
    places = list(itertools.product(range(p), range(v)))
    cost = {"reduce": dict.fromkeys(places, 3.0), "message": 0.4}
    alone, shared = (run("interleaved_1f1b", p, v, m, contends=contends, **cost).last for contends in (False, True))
    assert shared > alone


@pytest.mark.parametrize(("left", "shared"), [(0.0, 0.0), (0.1, 0.1), (0.4, 0.4), (2.0, 0.4)])
def test_of_two_on_a_way_each_has_half_while_both_take_it(left: float, shared: float) -> None:
    first = [forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1)]
    last = [forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)]
    cost = {"message": 0.4, "reduce": {(1, 0): 3 + left}, "contends": True}
    found = replay(compiled(lower([first, last], 1, reduce_each=True), 1), times(2, 1, **cost), ALL, spans=True)
    sent = next(span for span in found.spans if span.action == Action(Kind.SEND_B, 0, 1))
    assert sent.end - sent.start == pytest.approx(0.4 + shared)
    assert found.reduced[1] - sent.start == pytest.approx(left + shared + 3 + left)


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b"]), st.integers(1, 4), st.integers(1, 3), st.floats(0, 3),
    st.floats(0, 3),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_hiding_never_costs(name: str, p: int, groups: int, message: float, reduce: float) -> None:
    v = 2 if name == "interleaved_1f1b" and p > 1 else 1
    name = name if v > 1 or name != "interleaved_1f1b" else "1f1b"
    cost = {"message": message, "reduce": dict.fromkeys(itertools.product(range(p), range(v)), reduce)}
    orders = [run(name, p, v, groups * p, hides, **cost).last for hides in (ALL, NONE)]
    assert orders[0] <= orders[1] + 1e-9
    assert orders[0] >= run(name, p, v, groups * p).last - 1e-9


def test_spans_are_what_was_done() -> None:
    found = run("1f1b", 2, 1, 4, message=0.1)
    for rank in range(2):
        compute = sorted((s for s in found.spans if s.rank == rank and s.row == "compute"), key=lambda s: s.start)
        assert len(compute) == 8
        assert all(one.end <= other.start + 1e-12 for one, other in itertools.pairwise(compute))
    assert max(span.end for span in found.spans) == found.last


@given(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b"]), st.integers(1, 5), st.integers(1, 9), st.booleans())
@settings(deadline=None, max_examples=40)
def test_a_program_has_every_action_after_what_it_needs(name: str, p: int, m: int, each: bool) -> None:
    v = 3 if name == "interleaved_1f1b" else 1
    schedule = lower(ir.schedule(SCHEDULES[name].load(), p, v, m), v, ahead=None, reduce_each=each)
    program = compiled(schedule, v)
    for rank, order in enumerate(schedule):
        own = [action for action, step in zip(program.actions, program.steps, strict=True) if step[0] == rank]
        assert own == [action for action in order if action.kind in (Kind.F, Kind.B)]
    for at, (rank, work, source, channel, _) in enumerate(program.steps):
        kind, chunk, microbatch = program.actions[at]
        assert work == 2 * (rank * v + chunk) + (kind is Kind.B)
        stage = chunk * p + rank
        assert (source >= 0) == (p > 1 and stage != (0 if kind is Kind.F else p * v - 1))
        assert (channel >= 0) == (p > 1 and stage != (p * v - 1 if kind is Kind.F else 0))
        if source >= 0:
            sender, made = program.steps[source], program.actions[source]
            before = stage - 1 if kind is Kind.F else stage + 1
            assert source < at and (made.kind, made.microbatch) == (kind, microbatch)
            assert (made.chunk, sender[0]) == divmod(before, p) and sender[3] == 2 * sender[0] + (kind is Kind.B)
    reduced = [action for action, step in zip(program.actions, program.steps, strict=True) if step[4] and step[1] & 1]
    assert len(reduced) == p * v * (m if each else 1) and len(program.opens) == p * v


def test_a_schedule_whose_ranks_wait_for_each_other_is_said() -> None:
    stuck = [[backward(0, 0), forward(0, 0)], [forward(0, 0), backward(0, 0)]]
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] wait for each other"):
        compiled(lower(stuck, 1), 1)
