"""Findings name kind and culprit of injected faults, and nothing in healthy fleets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megascale.bench.fleet import Fleet
from megascale.bench.fleet_tables import cube_of, write_store
from megascale.bench.fleet_times import FleetFault, FleetLayout
from megascale.bench.observe import findings_of
from megascale.eventstore.query import open_store
from megascale.layout.topology import Topology
from megascale.observe.findings import combine, findings
from megascale.observe.heatmap import heat_map
from megascale.observe.job_cost import MIN_COST_SHARE

LAYOUTS = [
    FleetLayout(Topology(tp=4, pp=4, dp=4), steps=100),
    FleetLayout(Topology(tp=8, pp=2, dp=4), steps=100),
    FleetLayout(Topology(tp=2, pp=4, dp=4), chunks=2, node_ranks=4, steps=100),
    FleetLayout(Topology(dp=8), node_ranks=2, steps=100),
    FleetLayout(Topology(tp=2, pp=2, dp=2, cp=2), node_ranks=2, steps=100),
]


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
    assert (finding.kind, finding.culprit, finding.ranks) == ("data", "all ranks", ())


@pytest.mark.parametrize(("until", "kinds"), [(75, []), (100, ["job"])])
def test_a_job_that_was_slow_for_a_while_is_no_finding(until: int, kinds: list[str]) -> None:
    found = findings_of(Fleet(LAYOUTS[3], 5, FleetFault("job", factor=1.3, since=50, until=until)))
    assert [one.kind for one in found] == kinds


def test_time_on_the_host_that_costs_nothing_is_no_finding() -> None:
    """A replica that is faster than the others has a rank with time outside of actions."""
    fleet = Fleet(LAYOUTS[0], 6, FleetFault("slow", nodes=(1, 3, 5, 7), factor=1.2))
    cube = cube_of(fleet)
    wall = cube.wall.copy()
    assert cube.places.node[0] == 0
    wall[0] += 0.03 * cube.step_s
    outlier = next(each for each in heat_map(replace(cube, wall=wall)).outliers if each.kind == "host")
    assert (outlier.ranks, outlier.cost_share < MIN_COST_SHARE) == ((0,), True)
    found = combine(replace(cube, wall=wall), cube, fleet.tables["events"])
    assert [one for one in found if one.kind == "host"] == []


def test_slow_groups_are_found_once() -> None:
    (finding,) = findings_of(Fleet(LAYOUTS[0], 4, FleetFault("dp_group", rank=2, factor=3)))
    assert finding.kind == "communication"
    assert finding.ranks == tuple(range(2, 64, 4))


def test_a_node_without_peers_is_named_by_its_own_past() -> None:
    """A node that is a whole stage: no rank is slower than its peers."""
    layout = FleetLayout(Topology(tp=2, pp=2, dp=2), node_ranks=4, steps=100)
    (finding,) = findings_of(Fleet(layout, 8, FleetFault("slow", node=0, factor=1.3, since=50)))
    assert (finding.kind, finding.culprit, finding.since) == ("compute", "node n0000", 51)


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
    assert (finding.kind, finding.ranks) == ("compute", (12_287,))
