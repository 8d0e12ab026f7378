"""Suspects: slow ranks are told from those that wait for them, pauses and slow groups from what is planned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.fleet import Fleet
from lab.fleet_tables import cube_of
from lab.fleet_times import FleetFault, FleetLayout
from megascale.layout.topology import Topology
from megascale.operate.diagnose.slow.finding import JOB, SlowCause
from megascale.operate.diagnose.slow.step_cube import StepCube
from megascale.operate.diagnose.slow.step_levels import excess_seconds, predict_seconds, step_levels
from megascale.operate.diagnose.slow.stragglers import gc_pauses, slow_groups, stragglers

WIDE = FleetLayout(Topology(tp=4, pp=4, dp=4), steps=150)


def slow(cube: StepCube) -> list[SlowCause]:
    return list(stragglers(cube, step_levels(cube, cube)))


def pauses(cube: StepCube) -> list[SlowCause]:
    return list(gc_pauses(cube, step_levels(cube, cube)))


def test_a_slow_rank_is_named_and_its_peers_wait() -> None:
    (found,) = slow(cube_of(Fleet(WIDE, 1, FleetFault("slow", rank=37, factor=1.3, since=66))))
    assert str(found.culprit) == "rank 37"
    assert "peers of stage 2" in found.evidence[0]
    assert any("they wait for it" in line for line in found.evidence)


def test_a_suspect_costs_nothing_before_and_after() -> None:
    fault = FleetFault("slow", rank=5, factor=1.3, since=50, until=100)
    fleet, healthy = (Fleet(FleetLayout(Topology(tp=2, dp=4), steps=150), 2, one) for one in (fault, FleetFault()))
    (found,) = slow(cube_of(fleet))
    lost = float((fleet.seconds - healthy.seconds)[50:100].mean())
    assert found.seconds[50:100].mean() == pytest.approx(lost, rel=0.1)
    assert abs(np.delete(found.seconds, slice(50, 100)).mean()) < 0.05 * lost


def test_a_slow_job_names_nobody() -> None:
    assert not slow(cube_of(Fleet(WIDE, 3, FleetFault("job", factor=1.3, since=70))))


def test_uneven_work_names_nobody() -> None:
    work = np.random.default_rng(4).uniform(0.6, 1.6, WIDE.steps)
    assert not slow(cube_of(Fleet(WIDE, 4, work=work)))


@pytest.mark.parametrize("share", [0.4, 1.0, 2.0])
def test_what_the_model_explains_too_little_or_too_much_of_is_no_noise(share: float) -> None:
    """Stalls that the run's second half has more of; the model says a `share` of what they cost."""
    cube = cube_of(Fleet(FleetLayout(Topology(dp=4), steps=25), 4))
    stalls = 0.5 * cube.step_s * np.isin(np.arange(25), [3, 13, 15, 17, 19, 21, 23])
    levels = step_levels(cube, cube)
    stalled = replace(levels, seconds=levels.seconds + stalls[1:])
    healthy_s, all_s, rest_s = (each.noise_s(cube.steps, explained) for each, explained in (
        (levels, 0 * stalls), (stalled, 0 * stalls), (stalled, share * stalls)))  # fmt: skip
    assert all_s > 10 * healthy_s
    assert rest_s < 1.5 * healthy_s


def test_pauses_cost_what_they_cost() -> None:
    """The modelled cost beside that of the same job without pauses."""
    layout = FleetLayout(Topology(tp=2, pp=4, dp=8), steps=100)
    paused = Fleet(layout, 9, FleetFault("gc", share=6, every=32))
    (found,) = pauses(cube_of(paused))
    assert found.culprit == JOB
    lost = float((paused.seconds - Fleet(layout, 9).seconds).mean())
    assert found.seconds.mean() == pytest.approx(lost, rel=0.4)
    assert not pauses(cube_of(Fleet(layout, 9)))


def test_a_planned_collection_of_all_ranks_at_once_is_no_suspect() -> None:
    """However long it takes on each of them: ranks that share cores do not end together."""
    cube = cube_of(Fleet(WIDE, 5, FleetFault("gc", share=6, every=32)))
    (gc,) = cube.select("host", "gc")
    cube.own[:, :, gc] = 0
    cube.own[:, 19::20, gc] = np.random.default_rng(1).uniform(0.05, 0.6, cube.own[:, 19::20, gc].shape)
    assert not pauses(cube)


@pytest.mark.parametrize(("every", "found"), [(1, True), (30, True), (75, False)])
def test_rare_pauses_are_no_habit(every: int, found: bool) -> None:
    cube = cube_of(Fleet(WIDE, 5, FleetFault("gc", share=6, every=32)))
    (gc,) = cube.select("host", "gc")
    cube.own[:, :, gc] = 0
    cube.own[1, every - 1 :: every, gc] = 100.0
    assert bool(pauses(cube)) == found


def test_pauses_of_one_rank() -> None:
    (found,) = pauses(cube_of(Fleet(WIDE, 6, FleetFault("gc", rank=63, share=6, every=3, since=20))))
    assert found.culprit.ranks == (63,)


def test_slow_groups() -> None:
    cube = cube_of(Fleet(WIDE, 7, FleetFault("dp_group", rank=2, factor=3)))
    (found,) = slow_groups(cube, step_levels(cube, cube))
    assert set(found.culprit.ranks) == set(range(2, 64, 4))
    assert found.seconds.mean() == pytest.approx(0.024, rel=0.05)
    cube = cube_of(Fleet(WIDE, 7, FleetFault("slow", rank=2, factor=1.5)))
    assert not list(slow_groups(cube, step_levels(cube, cube)))


def test_slow_groups_of_experts() -> None:
    """Four ranks of tp hold different experts: those with the same ones are those of dp."""
    cube = cube_of(Fleet(WIDE, 7, FleetFault("dp_group", rank=2, factor=3)))
    parts = tuple(part._replace(axis="edp") if part.axis == "dp" else part for part in cube.parts)
    places = replace(cube.places, coords={**cube.places.coords, "ep": cube.places.coords["tp"]})
    (found,) = slow_groups(of_experts := replace(cube, parts=parts, places=places), step_levels(of_experts, of_experts))
    assert set(found.culprit.ranks) == set(range(2, 64, 4)) and found.culprit.axis == "edp"


def test_slow_groups_of_ranks_that_shard() -> None:
    """Pairs of replicas, of which one pair waits longer; its peers along dp do not."""
    cube = cube_of(Fleet(WIDE, 7))
    dp = cube.places.coords["dp"]
    slow = (cube.places.coords["tp"] == 1) & (dp // 2 == 1)
    places = replace(cube.places, coords={**cube.places.coords, "dp_shard": dp % 2})
    wait = cube.wait.copy()
    wait[np.ix_(slow, range(len(cube.steps)), cube.select("dp", "reduce_scatter"))] += 0.02
    cube = replace(cube, wait=wait, places=places)
    assert not list(slow_groups(cube, step_levels(cube, cube)))
    inner = tuple(part._replace(group_name="dp.shard") if part.axis == "dp" else part for part in cube.parts)
    (found,) = slow_groups(cube := replace(cube, parts=inner), step_levels(cube, cube))
    assert set(found.culprit.ranks) == set(cube.places.rank[slow]) and found.culprit.axis == "dp.shard"


def test_a_slow_group_without_peers_is_compared_with_its_past() -> None:
    """The only data-parallel group: all ranks, and nobody is accused."""
    cube = cube_of(Fleet(FleetLayout(Topology(dp=8), steps=100), 7, FleetFault("dp_group", rank=0, factor=8, since=50)))
    (found,) = slow_groups(cube, step_levels(cube, cube))
    assert found.culprit == JOB


def test_predicts_by_tokens_and_squared_lengths() -> None:
    draw = np.random.default_rng(8)
    lengths = draw.pareto(2.0, (200, 64)).clip(0.01, 20) * 500
    tokens, squares = lengths.sum(1), (lengths**2).sum(1)
    seconds = (2e-5 * tokens + 3e-8 * squares) * draw.normal(1, 0.02, 200)
    seconds[[50, 120]] *= 1.6
    ordinary = np.ones(200, bool)
    assert np.flatnonzero(excess_seconds(tokens, squares, seconds, ordinary)).tolist() == [50, 120]
    error = predict_seconds(tokens, squares, seconds, ordinary) / (2e-5 * tokens + 3e-8 * squares) - 1
    assert np.abs(error).max() < 0.02
    assert (seconds > 1.25 * np.median(seconds)).sum() > 10  # without the prediction healthy steps look slow


def test_equal_steps_are_predicted_by_their_median() -> None:
    seconds = np.full(40, 2.0)
    seconds[7] = 3.0
    ones = np.ones(40)
    assert predict_seconds(ones, 5 * ones, seconds, ones > 0) == pytest.approx(2.0)
    assert np.flatnonzero(excess_seconds(ones, 5 * ones, seconds, ones > 0)).tolist() == [7]
