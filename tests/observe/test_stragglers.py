"""Stragglers are told from those that wait for them, with the steps in which they are slow, and the reason."""

from __future__ import annotations

import numpy as np
import pytest

from megascale.bench.fleet import Fleet
from megascale.bench.fleet_tables import cube_of
from megascale.bench.fleet_times import FleetFault, FleetLayout
from megascale.layout.topology import Topology
from megascale.observe.step_work import predict_seconds, slow_steps
from megascale.observe.stragglers import gc_pauses, slow_groups, stragglers

WIDE = FleetLayout(Topology(tp=4, pp=4, dp=4), steps=150)


def test_tells_since_when() -> None:
    (found,) = stragglers(cube_of(Fleet(WIDE, 1, FleetFault("slow", rank=37, factor=1.3, since=66))))
    assert found.worst.name == "rank 37"
    assert abs(found.since - 67) <= 2
    assert found.until is None
    assert "peers of stage 2" in found.evidence[0]
    assert any("they wait for it" in line for line in found.evidence)


def test_tells_until_when() -> None:
    cube = cube_of(Fleet(WIDE, 2, FleetFault("slow", rank=60, factor=1.3)))
    (wait,) = cube.select("dp", "reduce_scatter")
    own = cube.own[60, 100:].copy()
    cube.own[60, 100:] = own / 1.3
    cube.wait[60, 100:, wait] += (own - own / 1.3).sum(1)
    (found,) = stragglers(cube)
    assert (found.since, found.until) == (1, 100)


@pytest.mark.parametrize(("since", "until", "named"), [(0, 50, False), (50, 100, False), (100, 150, True)])
def test_a_disturbance_of_one_window_that_is_over_names_nobody(since: int, until: int, named: bool) -> None:
    layout = FleetLayout(Topology(tp=2, dp=4), steps=150)
    found = stragglers(cube_of(Fleet(layout, 2, FleetFault("slow", rank=5, factor=1.3, since=since, until=until))))
    assert [each.worst.ranks for each in found] == ([(5,)] if named else [])


def test_a_slow_job_names_nobody() -> None:
    assert not stragglers(cube_of(Fleet(WIDE, 3, FleetFault("job", factor=1.3, since=70))))


def test_uneven_work_names_nobody() -> None:
    work = np.random.default_rng(4).uniform(0.6, 1.6, WIDE.steps)
    assert not stragglers(cube_of(Fleet(WIDE, 4, work=work)))


def test_pauses_of_ranks_in_turn() -> None:
    found = gc_pauses(cube_of(Fleet(WIDE, 5, FleetFault("gc", share=6, every=32))))
    assert found is not None
    assert found.ranks == ()
    healthy = cube_of(Fleet(WIDE, 5))
    slow = cube_of(Fleet(WIDE, 5, FleetFault("gc", share=6, every=32)))
    assert found.cost_s == pytest.approx(slow.step_s - healthy.step_s, rel=0.5)
    assert gc_pauses(healthy) is None


def test_pauses_cost_what_they_cost() -> None:
    """The modelled cost beside that of the same job without pauses."""
    layout = FleetLayout(Topology(tp=2, pp=4, dp=8), steps=100)
    slow = Fleet(layout, 9, FleetFault("gc", share=6, every=32))
    found = gc_pauses(cube_of(slow))
    assert found is not None
    assert found.cost_s == pytest.approx(float((slow.seconds - Fleet(layout, 9).seconds).mean()), rel=0.4)


def test_a_planned_collection_of_all_ranks_at_once_is_no_finding() -> None:
    fleet = Fleet(WIDE, 5, FleetFault("gc", share=6, every=32))
    cube = cube_of(fleet)
    (gc,) = cube.select("host", "gc")
    cube.own[:, :, gc] = 0
    cube.own[:, 19::20, gc] = 0.3
    assert cube.gc.sum() > 0.5 * fleet.times.gc.sum()
    assert gc_pauses(cube) is None


@pytest.mark.parametrize(("steps", "found"), [(1, False), (2, False), (3, True)])
def test_a_single_pause_is_no_habit(steps: int, found: bool) -> None:
    cube = cube_of(Fleet(WIDE, 5, FleetFault("gc", share=6, every=32)))
    (gc,) = cube.select("host", "gc")
    cube.own[:, :, gc] = 0
    cube.own[1, -steps:, gc] = 100.0
    assert (gc_pauses(cube) is not None) == found


def test_pauses_of_one_rank() -> None:
    found = gc_pauses(cube_of(Fleet(WIDE, 6, FleetFault("gc", rank=63, share=6, every=3, since=20))))
    assert found is not None
    assert found.ranks == (63,)
    assert found.since > 20


def test_pauses_of_a_job_of_one_rank() -> None:
    layout = FleetLayout(Topology(), steps=150)
    found = gc_pauses(cube_of(Fleet(layout, 6, FleetFault("gc", share=6, every=3, since=20))))
    assert found is not None
    assert (found.ranks, len(found.evidence)) == ((), 1)
    assert found.since > 20
    assert "pauses the rank, in " in found.evidence[0]
    assert gc_pauses(cube_of(Fleet(layout, 6))) is None


def test_slow_groups() -> None:
    found = slow_groups(cube_of(Fleet(WIDE, 7, FleetFault("dp_group", rank=2, factor=3))))
    assert {group.ranks for group in found} == {tuple(range(2 + 16 * stage, 16 + 16 * stage, 4)) for stage in range(4)}
    assert found[0].cost_s == pytest.approx(0.024, rel=0.05)
    assert not slow_groups(cube_of(Fleet(WIDE, 7, FleetFault("slow", rank=2, factor=1.5))))


def test_predicts_by_tokens_and_squared_lengths() -> None:
    draw = np.random.default_rng(8)
    lengths = draw.pareto(2.0, (200, 64)).clip(0.01, 20) * 500
    tokens, squares = lengths.sum(1), (lengths**2).sum(1)
    seconds = (2e-5 * tokens + 3e-8 * squares) * draw.normal(1, 0.02, 200)
    seconds[[50, 120]] *= 1.6
    ordinary = np.ones(200, bool)
    slow = slow_steps(tokens, squares, seconds, ordinary)
    assert np.flatnonzero(slow).tolist() == [50, 120]
    error = predict_seconds(tokens, squares, seconds, ordinary) / (2e-5 * tokens + 3e-8 * squares) - 1
    assert np.abs(error).max() < 0.02
    assert (seconds > 1.25 * np.median(seconds)).sum() > 10  # without the prediction healthy steps look slow


def test_equal_steps_are_predicted_by_their_median() -> None:
    seconds = np.full(40, 2.0)
    seconds[7] = 3.0
    ones = np.ones(40)
    assert predict_seconds(ones, 5 * ones, seconds, ones > 0) == pytest.approx(2.0)
    assert np.flatnonzero(slow_steps(ones, 5 * ones, seconds, ones > 0)).tolist() == [7]
