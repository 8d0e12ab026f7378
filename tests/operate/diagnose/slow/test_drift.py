"""Drift names the part that grew and since when, and what spreads the ranks' entries into the last reduction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.fleet import Fleet
from lab.fleet_tables import PEAK_FLOPS, cube_of
from lab.fleet_times import FleetFault, FleetLayout
from megascale.layout.topology import Topology
from megascale.operate.diagnose.slow.drift import Drift, change_points, drift

LAYOUT = FleetLayout(Topology(tp=2, pp=2, dp=4), steps=240)
PAIR = FleetLayout(Topology(dp=2), steps=400)


def changed(fleet: Fleet) -> Drift:
    return drift(cube_of(fleet), PEAK_FLOPS * fleet.layout.topology.world_size)


def test_change_points() -> None:
    draw = np.random.default_rng(1)
    series = draw.normal(1, 0.05, 300)
    assert change_points(series) == []
    series[120:] += 0.1
    (cut,) = change_points(series)
    assert abs(cut - 120) <= 4
    series[200] += 3  # an outlier is no change
    assert len(change_points(series)) == 1
    assert change_points(np.array([])) == change_points(np.ones(100)) == []


def test_rare_long_steps_are_no_change() -> None:
    for seed in range(20):
        draw = np.random.default_rng(seed)
        series = draw.normal(1, 0.01, 200) + (draw.random(200) < 0.1) * draw.uniform(0, 1, 200)
        assert change_points(series) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_does_not_drift(seed: int) -> None:
    found = changed(Fleet(LAYOUT, seed))
    assert found.growths == ()
    assert found.spread is None
    assert found.to_text() == "no part of a step has grown"


def test_the_whole_job_slows_down() -> None:
    found = changed(Fleet(LAYOUT, 2, FleetFault("job", factor=1.2, since=100)))
    assert found.growths[0].part == "backward"
    assert found.growths[0].everywhere
    assert abs(found.growths[0].since - 101) <= 2
    assert found.growths[0].after_s / found.growths[0].before_s == pytest.approx(1.2, rel=0.01)
    assert found.mfu_before and found.mfu_after
    assert found.mfu_before / found.mfu_after == pytest.approx(found.step_after_s / found.step_before_s)
    lost = sum(growth.mfu_points or 0.0 for growth in found.growths)
    assert lost == pytest.approx(found.mfu_before - found.mfu_after, rel=0.3)


@pytest.mark.parametrize("cores", [2, 16])
def test_growth_is_dated_from_its_own_change_and_ranks_that_share_cores_are_not_named(cores: int) -> None:
    """Steps fall at 42, and grow beyond their first level at 117: by more on the ranks of half of a host."""
    layout = replace(LAYOUT, node_ranks=8)
    cube = cube_of(Fleet(layout, 8, FleetFault("slow", node=0, factor=2.0, since=117)))
    places = replace(cube.places, crowded=(("h", 16, 2),) if cores == 2 else ())
    own, wall = cube.own.copy(), cube.wall.copy()
    own[:, :42] *= 1.2
    wall[:, :42] *= 1.2
    found = drift(replace(cube, places=places, own=own, wall=wall))
    backward = next(growth for growth in found.growths if growth.part == "backward")
    assert abs(backward.since - 118) <= 2
    assert not backward.everywhere and backward.ranks == (() if cores == 2 else tuple(range(8)))
    assert found.spread is None or bool(found.spread.last_ranks) == (cores == 16)
    assert ("rank" in found.to_text().split("backward grew")[1].splitlines()[0]) == (cores == 16)


def test_uneven_work_does_not_drift() -> None:
    work = np.concatenate([np.full(120, 1.0), np.full(120, 1.4)]) * np.random.default_rng(3).uniform(0.9, 1.1, 240)
    found = changed(Fleet(LAYOUT, 3, work=work))
    assert not [growth for growth in found.growths if growth.everywhere and growth.part in ("forward", "backward")]


def test_the_papers_decay_by_irregular_pauses() -> None:
    found = changed(Fleet(PAIR, 4, FleetFault("decay", share=8.0)))
    assert found.spread is not None
    assert "garbage collection" in found.spread.cause
    assert found.spread.after_s > 2 * found.spread.before_s
    assert not [growth for growth in found.growths if growth.part in ("forward", "backward", "optimizer")]
    assert found.mfu_before and found.mfu_after and found.mfu_after < 0.9 * found.mfu_before


def test_a_decay_of_unknown_cause() -> None:
    found = changed(Fleet(PAIR, 5, FleetFault("decay", share=8.0), gc_recorded=False))
    assert found.spread is not None
    assert found.spread.gc_correlation is None
    assert found.spread.cause.startswith("ranks are late in turn")


def test_a_slow_rank_is_no_decay() -> None:
    found = changed(Fleet(PAIR, 6, FleetFault("slow", rank=1, factor=1.3, since=150)))
    assert found.spread is not None
    assert found.spread.same_rank == 1.0
    assert found.spread.cause.startswith("rank 1 is last in most steps")
    assert found.to_json()["spread"]["cause"] == found.spread.cause


def test_growth_of_one_stage_is_not_the_whole_job() -> None:
    layout = FleetLayout(Topology(tp=2, pp=2, dp=2), steps=100, node_ranks=4)
    found = changed(Fleet(layout, 7, FleetFault("slow", node=0, factor=1.3, since=50)))
    backward = next(growth for growth in found.growths if growth.part == "backward")
    assert (backward.everywhere, backward.ranks) == (False, (0, 1, 2, 3))
