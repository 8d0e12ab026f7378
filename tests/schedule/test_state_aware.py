"""State-aware 1F1B: its order, its memory, and the example of ChunkFlow's paper, four sequences on four stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.layout.stages import looped
from megascale.plan.simulate.event_simulator import Simulation, simulate
from megascale.plan.simulate.profiles import Overlaps
from megascale.schedule.check import check_passes
from megascale.schedule.global_order import global_order
from megascale.schedule.ir import Kind, RankSchedule, Schedule, build_schedule
from megascale.schedule.one_f_one_b import one_f_one_b
from megascale.schedule.state_aware import build_state_aware, state_aware_1f1b
from tests.schedule.units import unit_times

P = 4

stages, kept = st.integers(1, 6), st.integers(1, 4)
sequences_of_chunks = st.lists(st.integers(1, 7), min_size=1, max_size=8)


def simulated(schedule: Schedule, lengths: list[float]) -> Simulation:
    """Simulate micro-batches of these lengths: a forward takes a length, a backward two, a message no time."""
    placement = looped(len(schedule), 1)
    times = replace(unit_times(placement), scales=[(length, 1.0) for length in lengths])
    return simulate(schedule, placement, times, Overlaps(tp="none", pp=True, dp=True), spans=True)


def idle(schedule: Schedule, lengths: list[float]) -> float:
    """The share of the step in which a stage neither computes nor recomputes."""
    simulation = simulated(schedule, lengths)
    busy = sum(span.end - span.start for span in simulation.spans if span.row == "compute")
    return 1 - busy / (len(schedule) * simulation.last)


def kept_chunks(order: RankSchedule, sequences: list[int], keep: int) -> int:
    """Count the chunks that have their activations at the peak of a rank's actions."""
    dropped = {i for end, n in zip(accumulate(sequences), sequences, strict=True) for i in range(end - n, end - keep)}
    peak = kept = 0
    for kind, _, i in order:
        kept += {"F": int(i not in dropped), "R": 1, "B": -1}[kind.value]
        peak = max(peak, kept)
    return peak


def test_unequal_sequences_have_the_published_bubble() -> None:
    schedule = build_schedule(one_f_one_b, P, 1, 4)
    assert idle(schedule, [4, 2, 1, 1]) == pytest.approx(4 / 7)  # 57.14%
    assert idle(schedule, [2, 2, 2, 2]) == pytest.approx(3 / 7)  # 42.86%
    assert idle(build_schedule(one_f_one_b, P, 1, 2), [4, 4]) == pytest.approx(0.6)  # chunks of 4: 60%


def test_chunks_with_two_kept_have_the_published_bubble() -> None:
    """The sequence of 4 is two chunks of 2, after chunks of 2 and 1 + 1."""
    assert idle(build_state_aware(P, [1, 1, 2], keep=2), [2] * 4) == pytest.approx(1 - 24 / 46)  # 47.8%


def test_chunks_with_one_kept_recompute_the_first() -> None:
    """A step of 48 units, 26 of them busy, a share of 54.17%; the paper states 54.1% as the bubble."""
    schedule = build_state_aware(P, [1, 1, 2], keep=1)
    assert simulated(schedule, [2] * 4).last == 48
    assert idle(schedule, [2] * 4) == pytest.approx(1 - 26 / 48)


def test_the_longest_sequence_first_has_the_bubble_of_equal_sequences() -> None:
    assert idle(build_state_aware(P, [2, 1, 1], keep=2), [2] * 4) == pytest.approx(3 / 7)
    assert simulated(build_state_aware(P, [2, 1, 1], keep=1), [2] * 4).last == 44  # with the recomputed forward of 2


def test_chunks_are_shorter_than_the_sequences() -> None:
    whole = simulated(build_schedule(one_f_one_b, P, 1, 4), [4, 2, 1, 1]).last
    assert [simulated(build_state_aware(P, [1, 1, 2], keep), [2] * 4).last for keep in (1, 2)] == [48, 46]
    assert whole == 56


@given(p=stages, sequences=sequences_of_chunks, keep=kept)
def test_orders_are_complete_and_free_of_deadlock(p: int, sequences: list[int], keep: int) -> None:
    schedule = build_state_aware(p, sequences, keep)
    for rank, order in enumerate(schedule):
        check_passes(order, rank, looped(p, 1), sum(sequences))
    global_order([[order] for order in schedule], looped(p, 1))


@given(p=stages, sequences=sequences_of_chunks, keep=kept)
def test_chunks_follow_those_that_they_depend_on(p: int, sequences: list[int], keep: int) -> None:
    """A forward reads the keys and values of the chunks before, a backward the gradients that the chunks after leave
    for them. All chunks but the last `keep` are recomputed directly before their backward.
    """
    ends = [*accumulate(sequences)]
    dropped = {i for end, n in zip(ends, sequences, strict=True) for i in range(end - n, end - keep)}
    for order in build_state_aware(p, sequences, keep):
        forwards, backwards = ([a.microbatch for a in order if a.kind is kind] for kind in (Kind.F, Kind.B))
        for end, chunks in zip(ends, sequences, strict=True):
            own = [*range(end - chunks, end)]
            assert [i for i in forwards if i in own] == own
            assert [i for i in backwards if i in own] == own[::-1]
        recomputed = [b.microbatch for a, b in pairwise(order) if b.kind is Kind.B and a == b._replace(kind=Kind.R)]
        assert sorted(recomputed) == sorted(a.microbatch for a in order if a.kind is Kind.R) == sorted(dropped)


@given(p=stages, sequences=sequences_of_chunks, keep=kept)
def test_kept_activations_do_not_grow_with_the_longest_sequence(p: int, sequences: list[int], keep: int) -> None:
    for rank, order in enumerate(build_state_aware(p, sequences, keep)):
        assert kept_chunks(order, sequences, keep) <= keep + p - rank - 1
    longest = [*sequences, 40]
    assert kept_chunks(state_aware_1f1b(p, longest, keep, p - 1), longest, keep) <= keep


@given(p=stages, m=st.integers(1, 12))
def test_chunks_of_short_sequences_are_1f1b(p: int, m: int) -> None:
    assert build_state_aware(p, [1] * m, 1) == build_schedule(one_f_one_b, p, 1, m)


def test_a_chunk_or_more_is_kept() -> None:
    with pytest.raises(ValueError, match="one chunk or more"):
        state_aware_1f1b(2, [2], 0, 0)
