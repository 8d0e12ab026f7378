"""The heat map names slow ranks and nodes, with their cost, and nobody in a fleet of uneven stages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.fleet import Fleet
from lab.fleet_tables import cube_of
from lab.fleet_times import FleetFault, FleetLayout
from megascale.layout.topology import Topology
from megascale.operate.diagnose.slow import heatmap
from megascale.operate.diagnose.slow.heatmap import HeatMap, heat_map
from megascale.operate.diagnose.slow.step_cube import Part, Places, StepCube

WIDE = FleetLayout(Topology(tp=4, pp=4, dp=4), microbatches=16)


def machines(seed: int, stages: int = 8, ranks: int = 12_288, steps: int = 50, parts: int = 8) -> tuple[StepCube, set]:
    """Healthy ranks with 10% noise a part and step; 0.5% of the machines of 8 ranks are slow by 10%. Stages differ."""
    draw = np.random.default_rng(seed)
    topology = Topology(tp=8, pp=stages, dp=ranks // 8 // stages)
    coords = np.array([topology.coord(rank) for rank in range(ranks)]).T
    node = np.arange(ranks) // 8
    places = Places(np.arange(ranks), node, tuple(f"n{number}" for number in range(ranks // 8)),
                    dict(zip(("tp", "cp", "dp", "pp"), coords, strict=True)))  # fmt: skip
    slow = draw.choice(ranks // 8, ranks // 8 // 200, replace=False)
    speed = (1 + 0.1 * np.isin(node, slow)) * (1 + 0.5 * coords[3] / stages)
    own = speed[:, None, None] * (1 + 0.1 * draw.standard_normal((ranks, steps, parts), np.float32)) / parts
    named = [Part("compute", name, chunk) for name in "FB" for chunk in range(parts // 2)]
    wall = np.full((ranks, steps), 2.0, np.float32)
    cube = StepCube(places, np.arange(1, steps + 1), tuple(named), own.astype(np.float32), np.zeros_like(own),
                    wall, np.ones(wall.shape, bool), np.ones(steps, bool), np.zeros(wall.shape, np.int64),
                    np.zeros((ranks, parts)), np.ones(steps), np.ones(steps), 8)  # fmt: skip
    return cube, {f"node n{number}" for number in slow}


def of_one_stage(cube: StepCube) -> StepCube:
    """The cube of a job that does not know its stages."""
    return replace(cube, places=replace(cube.places, coords={**cube.places.coords, "pp": 0 * cube.places.rank}))


def names(found: HeatMap) -> set[str]:
    return {str(outlier.culprit) for outlier in found.outliers}


def test_finds_half_a_percent_of_slow_machines() -> None:
    cube, slow = machines(1)
    assert names(heat_map(cube)) == slow


def test_needs_roles() -> None:
    cube, slow = machines(2)
    blind = heat_map(of_one_stage(cube))
    assert not names(blind) & slow


@pytest.mark.parametrize("layout", [WIDE, FleetLayout(Topology(tp=2, pp=4, dp=2), chunks=2, node_ranks=4)])
def test_uneven_stages_are_no_outliers(layout: FleetLayout) -> None:
    cube = cube_of(Fleet(layout))
    assert not heat_map(cube).outliers
    assert heat_map(of_one_stage(cube)).outliers  # the head's stage


@pytest.mark.parametrize("fault", [
    FleetFault("slow", rank=63, factor=1.1), FleetFault("slow", rank=5, factor=1.5),
    FleetFault("slow", node=7, factor=1.1), FleetFault("data", rank=2, share=3, every=3),
])  # fmt: skip
def test_names_the_culprit_and_its_cost(fault: FleetFault) -> None:
    healthy, cube = cube_of(Fleet(WIDE, 3)), cube_of(Fleet(WIDE, 3, fault))
    (outlier,) = heat_map(cube).outliers
    assert str(outlier.culprit) == (f"node n{fault.node:04d}" if fault.node >= 0 else f"rank {fault.rank}")
    assert outlier.kind == ("data" if fault.kind == "data" else "compute")
    real = cube.step_s - healthy.step_s
    assert outlier.cost_s == pytest.approx(real, rel=0.2, abs=0.002 * cube.step_s)
    assert outlier.parts[0][0] == ("data" if fault.kind == "data" else "B of chunk 0")


def test_a_tensor_parallel_peer_waits_and_is_not_named() -> None:
    cube = cube_of(Fleet(WIDE, 4, FleetFault("slow", rank=21, factor=1.5)))
    found = heat_map(cube)
    assert names(found) == {"rank 21"}
    wait = found.seconds[:, found.columns.index("tp wait")]
    assert wait[21] == min(wait[20:24]) < min(wait[[20, 22, 23]]) / 2
    whole = cube.own[:, :, cube.select("compute", "F")].sum(2) + cube.wait_of("tp")
    blind = replace(
        cube, own=np.concatenate([cube.own, whole[:, :, None] / 4], 2), parts=(*cube.parts, Part("compute", "x"))
    )
    assert len(heat_map(blind).outliers) > 1  # with waits in its own time, the whole group looks slow


def test_a_short_fault_needs_continuity(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(WIDE, 5)
    cube = cube_of(fleet)
    own = cube.own.copy()
    own[9, 30:36, cube.select("compute", "B")] *= 3.0  # a hiccup of six steps
    cube = replace(cube, own=own, wall=cube.wall)
    assert not heat_map(cube).outliers
    monkeypatch.setattr(heatmap, "PERSISTENT_BLOCKS", 0)
    assert names(heat_map(cube)) == {"rank 9"}


def test_a_rank_that_is_stopped_now_and_then_is_slow() -> None:
    """A third of its steps take twice as long, in every block of the window, and all others wait for it."""
    cube = cube_of(Fleet(WIDE, 5))
    own = cube.own.copy()
    own[9, 1::3, :] *= 2
    (outlier,) = heat_map(replace(cube, own=own)).outliers
    assert outlier.culprit.ranks == (9,)
    assert outlier.cost_s == pytest.approx(float(cube.compute[9, 1::3].sum()) / len(cube.steps), rel=0.4)


def test_a_rank_whose_excess_explains_the_loss_is_an_outlier() -> None:
    """Of two ranks that vary as much as a crowded host's, one is stopped in some steps: only the loss tells."""
    fleet = Fleet(FleetLayout(Topology(pp=2, dp=2), node_ranks=4), 8, noise=0.2)
    cube = cube_of(fleet)
    usual, own = cube.take(slice(1, 30)), cube.own.copy()
    own[3, 32::4] *= 3.0
    window = replace(cube, own=own).take(slice(30, 60))
    lost = float((own - cube.own)[3, 30:].sum(1).mean())
    assert not heat_map(window).outliers
    assert names(heat_map(window, usual, lost)) == {"rank 3"}
    assert not heat_map(cube.take(slice(30, 60)), usual, lost).outliers


@pytest.mark.filterwarnings("error")
def test_a_rank_without_ordinary_steps_is_missing_and_not_0() -> None:
    cube = cube_of(Fleet(WIDE, 7))
    cube.ordinary[[5, 6]] = False
    found = heat_map(cube)
    assert found.outliers == ()
    assert np.isnan(found.seconds[5]).all() and np.isfinite(np.delete(found.seconds, [5, 6], 0)).all()
    healthy = heat_map(cube_of(Fleet(WIDE, 7)))
    forward = found.columns.index("F of chunk 0")
    assert found.peer_s[7, forward] == pytest.approx(healthy.peer_s[7, forward], rel=0.01)


@pytest.mark.parametrize(("factor", "named"), [(1.05, False), (1.15, True)])
def test_a_rank_with_a_single_peer_needs_a_larger_margin(factor: float, named: bool) -> None:
    fault = FleetFault("slow", rank=3, factor=factor)
    pair = cube_of(Fleet(FleetLayout(Topology(pp=2, dp=2), node_ranks=4), 8, fault, noise=0.005))
    assert names(heat_map(pair)) == ({"rank 3"} if named else set())
    assert names(heat_map(cube_of(Fleet(FleetLayout(Topology(dp=4)), 8, fault, noise=0.005)))) == {"rank 3"}


def test_steps_with_settled_tags_do_not_count() -> None:
    fault = FleetFault("gc", rank=6, share=2, every=2)
    fleet = Fleet(WIDE, 6, fault)
    cube = cube_of(fleet)
    own = cube.own.copy()
    own[6, fleet.times.gc.reshape(60, -1)[:, 6] > 0, cube.select("compute", "F")] += 0.05  # the pause is inside F
    assert not heat_map(replace(cube, own=own)).outliers
    assert heat_map(replace(cube, own=own, ordinary=np.ones_like(cube.ordinary))).outliers


def test_the_ratio_to_the_peers() -> None:
    found = heat_map(cube_of(Fleet(WIDE, 3, FleetFault("slow", rank=63, factor=1.1))))
    assert found.ratio[63, found.columns.index("F of chunk 0")] == pytest.approx(1.1, abs=0.02)


@pytest.mark.filterwarnings("error")
def test_a_window_without_ordinary_steps_or_times_divides_nothing_by_nothing() -> None:
    cube = cube_of(Fleet(WIDE, 7))
    none = np.zeros_like(cube.ordinary)
    for empty in (
        replace(cube, ordinary=none, wall=0 * cube.wall, own=0 * cube.own, wait=0 * cube.wait),
        replace(cube, ordinary=none),
        cube.take(slice(0, 0)),
    ):
        assert len(empty.places.nodes) > 1
        assert heat_map(empty).outliers == ()
