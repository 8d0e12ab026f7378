"""Findings name kind and culprit of injected faults, and nothing in healthy fleets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.fleet import Fleet
from lab.fleet_tables import cube_of, write_store
from lab.fleet_times import FleetFault, FleetLayout
from lab.observe import findings_of
from megascale.layout.topology import Topology
from megascale.operate.diagnose.slow.finding import JOB, Finding
from megascale.operate.diagnose.slow.findings import MIN_COST_SHARE, combine, crowd_note, findings
from megascale.operate.diagnose.slow.heatmap import heat_map
from megascale.operate.diagnose.slow.step_cube import Part, StepCube
from megascale.operate.store.query import open_store

LAYOUTS = [
    FleetLayout(Topology(tp=4, pp=4, dp=4), steps=100),
    FleetLayout(Topology(tp=8, pp=2, dp=4), steps=100),
    FleetLayout(Topology(tp=2, pp=4, dp=4), chunks=2, node_ranks=4, steps=100),
    FleetLayout(Topology(dp=8), node_ranks=2, steps=100),
    FleetLayout(Topology(tp=2, pp=2, dp=2, cp=2), node_ranks=2, steps=100),
]


def combined(cube: StepCube, fleet: Fleet) -> list[Finding]:
    return combine(cube, cube, fleet.tables["events"])


def test_a_healthy_fleet_of_uneven_work() -> None:
    work = np.random.default_rng(1).uniform(0.7, 1.5, 100)
    assert findings_of(Fleet(LAYOUTS[0], 1, work=work)) == []


def test_single_slow_steps() -> None:
    fleet = Fleet(LAYOUTS[3], 2)
    columns = fleet.tables["steps"]
    columns["train_ns"][np.isin(columns["step"], [40, 70])] *= 3
    (finding,) = findings_of(fleet)
    assert finding.kind == "steps"
    assert "2 of 100 steps" in finding.evidence[0]
    assert "40, 70" in finding.evidence[0]


def test_all_ranks_wait_for_data() -> None:
    (finding,) = findings_of(Fleet(LAYOUTS[3], 3, FleetFault("data", share=5)))
    assert (finding.kind, finding.culprit) == ("data", JOB)


@pytest.mark.parametrize(("until", "kinds"), [(75, []), (100, ["job"])])
def test_a_job_that_was_slow_for_a_while_is_no_finding(until: int, kinds: list[str]) -> None:
    found = findings_of(Fleet(LAYOUTS[3], 5, FleetFault("job", factor=1.3, since=50, until=until)))
    assert [one.kind for one in found] == kinds


def test_a_job_that_became_slower_while_its_work_fell() -> None:
    """A step of mean work computes longer, though no step does."""
    layout = replace(LAYOUTS[3], steps=24)
    work = np.repeat([1.3, 1.1], 12) * np.random.default_rng(1).uniform(0.8, 1.2, 24)
    (finding,) = findings_of(Fleet(layout, 7, FleetFault("job", factor=1.15, since=12), work=work))
    assert (finding.kind, finding.since, finding.until) == ("job", 13, None)


def test_time_on_the_host_that_costs_nothing_is_no_finding() -> None:
    """A replica that is faster than the others has a rank with time outside of actions."""
    fleet = Fleet(LAYOUTS[0], 6, FleetFault("slow", nodes=(1, 3, 5, 7), factor=1.2))
    cube = cube_of(fleet)
    wall = cube.wall.copy()
    assert cube.places.node[0] == 0
    wall[0] += 0.03 * cube.step_s
    outlier = next(each for each in heat_map(replace(cube, wall=wall)).outliers if each.kind == "host")
    assert (outlier.culprit.ranks, outlier.cost_share < MIN_COST_SHARE) == ((0,), True)
    found = combined(replace(cube, wall=wall), fleet)
    assert [one for one in found if one.kind == "host"] == []


def test_slow_groups_are_found_once() -> None:
    (finding,) = findings_of(Fleet(LAYOUTS[0], 4, FleetFault("dp_group", rank=2, factor=3)))
    assert finding.kind == "communication"
    assert finding.culprit.ranks == tuple(range(2, 64, 4))


def test_a_node_without_peers_is_named_by_its_own_past() -> None:
    """A node that is a whole stage: no rank is slower than its peers."""
    layout = FleetLayout(Topology(tp=2, pp=2, dp=2), node_ranks=4, steps=100)
    (finding,) = findings_of(Fleet(layout, 8, FleetFault("slow", node=0, factor=1.3, since=50)))
    assert (finding.kind, str(finding.culprit), finding.since) == ("compute", "node n0000", 51)


@pytest.mark.parametrize("fault", [
    FleetFault("slow", rank=5, factor=2.0, since=80, until=160),
    FleetFault("slow", node=1, factor=1.5, since=80, until=160),
    FleetFault("data", rank=4, share=30, since=80), FleetFault("job", factor=1.4, since=80),
    FleetFault("gc", rank=3, share=30, every=3, since=80),
])  # fmt: skip
def test_cost_and_onset_are_those_of_the_steps(fault: FleetFault) -> None:
    """As of the last step of the fault: what the job lost, since the step in which it began to."""
    layout = FleetLayout(Topology(tp=1, pp=2, dp=4), node_ranks=2, steps=240)
    fleet, healthy = (Fleet(layout, 5, one, noise=0.02) for one in (fault, FleetFault()))
    finding = combined(cube_of(fleet).take(slice(0, 160)), fleet)[0]
    lost = float((fleet.seconds - healthy.seconds)[80:160].mean())
    assert set(finding.culprit.ranks) == set(
        np.flatnonzero(fault.culprits(np.arange(8), np.arange(8) // 2)) if fault.kind != "job" else ()
    )
    assert (finding.until, abs(finding.since - 81) <= 5) == (None, True)
    assert finding.cost_s == pytest.approx(lost, rel=0.1)


def test_data_of_the_last_stage_costs_what_the_pipeline_does_not_hide() -> None:
    fault = FleetFault("data", rank=6, share=30, since=80)
    layout = FleetLayout(Topology(tp=1, pp=2, dp=4), node_ranks=2, steps=160)
    fleet, healthy = (Fleet(layout, 5, one, noise=0.02) for one in (fault, FleetFault()))
    (finding,) = findings_of(fleet)
    assert (finding.kind, finding.culprit.ranks) == ("data", (6,))
    assert finding.cost_s == pytest.approx(float((fleet.seconds - healthy.seconds)[80:].mean()), rel=0.1)


def test_what_is_over_comes_last_and_is_told_to_be_over() -> None:
    """A slow rank until step 100 that cost more than what goes on."""
    layout = FleetLayout(Topology(tp=1, pp=2, dp=4), node_ranks=2, steps=200)
    first = Fleet(layout, 5, FleetFault("slow", rank=1, factor=2.0, since=50, until=100))
    second = Fleet(layout, 5, FleetFault("slow", rank=6, factor=1.3, since=150))
    cubes = [cube_of(fleet) for fleet in (first, second)]
    names = ("own", "wait", "wall", "ordinary", "entered_ns")
    both = replace(cubes[1], **{
        name: np.concatenate([getattr(cubes[0], name)[:, :120], getattr(cubes[1], name)[:, 120:]], 1) for name in names
    })  # fmt: skip
    now, over = combined(both, second)
    assert (now.culprit.ranks, now.until) == ((6,), None)
    assert (over.culprit.ranks, over.until) == ((1,), 100)
    assert over.cost_s > now.cost_s
    assert "steps 51 to 100, over; cost " in str(over)


def test_the_findings_never_cost_more_than_was_lost() -> None:
    """Two ranks of one stage that are equally slow: without one of them the job is as slow."""
    fault = FleetFault("slow", nodes=(0, 1), factor=1.5, since=50)
    layout = FleetLayout(Topology(tp=1, pp=1, dp=8), node_ranks=1, steps=100)
    fleet, healthy = Fleet(layout, 5, fault), Fleet(layout, 5)
    found = findings_of(fleet)
    lost = float((fleet.seconds - healthy.seconds)[50:].mean())
    assert {finding.culprit.ranks for finding in found} == {(0,), (1,)}
    assert sum(finding.cost_s for finding in found) == pytest.approx(lost, rel=0.05)


def test_steps_with_saves_are_compared_among_themselves() -> None:
    """A save in nearly every step: its tag says nothing about a slow rank."""
    fleet = Fleet(LAYOUTS[0], 6, FleetFault("slow", rank=21, factor=1.5, since=40))
    tags = fleet.tables["steps"]["tags"]
    mine = fleet.tables["steps"]["step"] % 30 > 0
    tags[mine] = [f"{tag},checkpoint".strip(",") for tag in tags[mine]]
    (finding,) = findings_of(fleet)
    assert finding.culprit.ranks == (21,)
    healthy = Fleet(LAYOUTS[0], 6)
    healthy.tables["steps"]["tags"][healthy.tables["steps"]["rank"] == 3] = "checkpoint"
    assert findings_of(healthy) == [], "a rank without ordinary steps is not compared"


def on_cores(fleet: Fleet, cores: int) -> Fleet:
    """The same job on one host with so many cores."""
    fleet.tables["ranks"] |= {
        "host": np.full(len(fleet.rank.reshape(-1)), "h", object),
        "cores": np.full(fleet.rank.size, cores),
    }
    return fleet


@pytest.mark.parametrize(("cores", "factor", "since", "named"), [
    (8, 1.2, 50, True), (0, 1.2, 50, True), (2, 1.2, 50, False), (2, 1.6, 50, True), (2, 1.6, 0, False),
    (2, 3.0, 0, True),
])  # fmt: skip
def test_ranks_that_share_cores_are_named_for_large_costs_only(
    cores: int, factor: float, since: int, named: bool
) -> None:
    layout = FleetLayout(Topology(tp=1, pp=1, dp=8), node_ranks=8, steps=100)
    fleet = on_cores(Fleet(layout, 5, FleetFault("slow", rank=3, factor=factor, since=since)), cores)
    found = findings_of(fleet)
    assert [finding.culprit.ranks for finding in found if finding.culprit.ranks] == [(3,)] * named
    if since and not named:
        assert [finding.culprit for finding in found] == [JOB], "what was lost is told, and nobody accused"
    note = crowd_note(cube_of(fleet).places)
    assert note.startswith("8 ranks share 2 cores of h: ") if cores == 2 else note == ""


@pytest.mark.parametrize(("nodes", "cores", "named"), [(1, 2, False), (1, 8, True), (2, 2, True)])
@pytest.mark.parametrize("since", [0, 50])
def test_waits_of_ranks_that_share_cores_accuse_no_group(nodes: int, cores: int, named: bool, since: int) -> None:
    """The waits of one data-parallel group are longer than all compute. Between two nodes is a link, which may be slow;
    the ranks of one node wait for a core.
    """
    layout = FleetLayout(Topology(tp=2, pp=2, dp=2), node_ranks=8, steps=100)
    fleet = on_cores(Fleet(layout, 5), cores)
    cube = cube_of(fleet)
    places, dp = cube.places, cube.select("dp")
    mine = np.flatnonzero((places.coords["tp"] == 0) & (places.coords["pp"] == 0))
    wait, wall = cube.wait.copy(), cube.wall.copy()
    others = np.setdiff1d(np.arange(8), mine)  # they wait for messages of these ranks
    wait[np.ix_(mine, range(since, 100), dp[:1])] += 2 * cube.step_s
    wait[np.ix_(others, range(since, 100), cube.select("pp")[:1])] += 2 * cube.step_s
    wall[:, since:] += 2 * cube.step_s
    if nodes == 2:  # every group along dp has a rank on each
        places = replace(places, node=places.coords["dp"], nodes=("a", "b"))
    found = combined(replace(cube, places=places, wait=wait, wall=wall), fleet)
    groups = [finding.culprit.ranks for finding in found if finding.culprit.ranks]
    assert groups == ([tuple(places.rank[mine].tolist())] if named else [])


@pytest.mark.parametrize(("factor", "named"), [(60, [("drift", ())]), (500, [("link", (1, 5))])])
def test_a_link_between_ranks_that_share_cores_is_named_for_large_costs_only(
    factor: float, named: list[tuple[str, tuple[int, ...]]]
) -> None:
    layout = FleetLayout(Topology(pp=2, dp=4), node_ranks=1, steps=100)
    fleet = on_cores(Fleet(layout, 5, FleetFault("link", node=1, peer=5, factor=factor, since=50)), 2)
    cube = cube_of(fleet)
    places = replace(cube.places, node=np.zeros(8, np.int64), nodes=("h",))
    found = combined(replace(cube, places=places), fleet)
    assert [(finding.kind, finding.culprit.ranks) for finding in found] == named


@pytest.mark.parametrize("seed", range(4))
def test_noise_is_no_finding(seed: int) -> None:
    """Healthy ranks that vary as much as those of a crowded host, in bursts of other programs."""
    layout = FleetLayout(Topology(tp=1, pp=2, dp=2), node_ranks=4, steps=240)
    bursts = np.repeat(np.random.default_rng(seed).uniform(0.8, 1.4, 24), 10)
    fleet = on_cores(Fleet(layout, seed, noise=0.2, work=bursts), 2)
    for name in ("tokens", "flops"):
        fleet.tables["steps"][name] = np.full_like(fleet.tables["steps"][name], 1000)  # the work is the same
    assert [str(one) for one in findings_of(fleet) if one.culprit.ranks] == []


def test_a_store_has_the_same_findings(tmp_path: Path) -> None:
    fleet = Fleet(LAYOUTS[4], 5, FleetFault("slow", rank=11, factor=1.5, since=30))
    write_store(fleet, tmp_path)
    assert findings(open_store(tmp_path)) == findings_of(fleet)


def test_a_run_without_steps_has_no_findings(tmp_path: Path) -> None:
    fleet = Fleet(LAYOUTS[3], 6)
    fleet.tables = {"ranks": fleet.tables["ranks"]}
    write_store(fleet, tmp_path)
    assert findings(open_store(tmp_path)) == []


@pytest.mark.slow
def test_a_job_of_12288_ranks(tmp_path: Path) -> None:
    layout = FleetLayout(Topology(tp=8, pp=8, dp=192), chunks=3, steps=12)
    write_store(Fleet(layout, 7, FleetFault("slow", rank=12_287, factor=1.15), events=1), tmp_path)
    (finding,) = findings(open_store(tmp_path))
    assert (finding.kind, finding.culprit.ranks) == ("compute", (12_287,))


@pytest.mark.parametrize("in_compute", [0.0, 0.4])
def test_a_process_that_is_stopped_now_and_then_stands_still_wherever_it_is_stopped(in_compute: float) -> None:
    """In a wait, which is as long on all ranks, or in part in an action, which takes longer then."""
    fleet = Fleet(FleetLayout(Topology(pp=2, dp=2), node_ranks=2, steps=160), 3)
    cube = cube_of(fleet)
    stopped, pause_s = slice(80, 160, 6), 8 * cube.step_s
    own, wall = np.concatenate([cube.own, np.zeros_like(cube.own[:, :, :1])], 2), cube.wall.copy()
    own[3, stopped, -1] = pause_s
    own[3, stopped, cube.select("compute", "B")[0]] += in_compute * pause_s
    wall[:, stopped] += pause_s
    cube = replace(cube, own=own, wall=wall, wait=np.concatenate([cube.wait, np.zeros_like(own[:, :, -1:])], 2),
                   bytes=np.concatenate([cube.bytes, np.zeros((4, 1))], 1),
                   parts=(*cube.parts, Part("host", "pause")))  # fmt: skip
    (found,) = combine(cube, cube, fleet.tables["events"])
    assert (found.kind, str(found.culprit), found.until) == ("pause", "rank 3", None)
    assert abs(found.since - 81) <= 1
    assert found.cost_s == pytest.approx(float((wall[0, 80:] - fleet.seconds[80:]).mean()), rel=0.2)
