"""Findings name kind and culprit of injected faults, and nothing in healthy fleets."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megascale.eventstore.query import open_store
from megascale.layout.topology import Topology
from megascale.observe.delay_matrix import delay_matrix
from megascale.observe.drift import drift
from megascale.observe.findings import Finding, combine, findings
from tests.observe.fleet import PEAK_FLOPS, Fault, Fleet, Layout, cube_of, write_store

LAYOUTS = [
    Layout(Topology(tp=4, pp=4, dp=4), steps=100),
    Layout(Topology(tp=8, pp=2, dp=4), steps=100),
    Layout(Topology(tp=2, pp=4, dp=4), chunks=2, node_ranks=4, steps=100),
    Layout(Topology(dp=8), node_ranks=2, steps=100),
    Layout(Topology(tp=2, pp=2, dp=2, cp=2), node_ranks=2, steps=100),
]


def found_in(fleet: Fleet) -> list[Finding]:
    cube = cube_of(fleet)
    change = drift(cube, PEAK_FLOPS * fleet.layout.topology.world_size)
    return combine(cube, change, delay_matrix(fleet.tables["events"], cube.places))


def a_rank(draw: random.Random, layout: Layout) -> int:
    return draw.randrange(layout.topology.world_size)


def reader(draw: random.Random, layout: Layout) -> int:
    return draw.randrange(layout.topology.tp)  # of the first stage


def a_node(draw: random.Random, layout: Layout) -> int:
    return draw.randrange(layout.topology.world_size // layout.node_ranks)


def a_link(draw: random.Random, layout: Layout) -> Fault:
    nodes = layout.topology.world_size // layout.node_ranks
    node = a_node(draw, layout)
    peer = node + nodes // layout.topology.pp
    return Fault("link", node=node, peer=peer if peer < nodes and draw.random() < 0.5 else -1, factor=6)


FAULTS: dict[str, tuple[str, Callable[[random.Random, Layout, int], Fault]]] = {
    "slow by 10%": ("compute", lambda draw, at, since: Fault("slow", rank=a_rank(draw, at), factor=1.1, since=since)),
    "slow by 50%": ("compute", lambda draw, at, since: Fault("slow", rank=a_rank(draw, at), factor=1.5, since=since)),
    "slow node": ("compute", lambda draw, at, since: Fault("slow", node=a_node(draw, at), factor=1.1, since=since)),
    "slow link": ("link", lambda draw, at, since: a_link(draw, at)),
    "gc storm": ("gc", lambda draw, at, since: Fault("gc", share=6, every=at.topology.world_size // 2, since=since)),
    "data stalls": ("data", lambda draw, at, step: Fault("data", rank=reader(draw, at), share=6, every=3, since=step)),
    "slow job": ("job", lambda draw, at, since: Fault("job", factor=1.15, since=since + 40)),
}  # fmt: skip


def is_right(fault: Fault, kind: str, found: list[Finding]) -> bool:
    """Return True if the costliest finding has the kind and the culprit of a fault."""
    if not found or found[0].kind != kind:
        return False
    if fault.kind == "link":
        ends = {f"n{fault.node:04d}"} | ({f"n{fault.peer:04d}"} if fault.peer >= 0 else set())
        return all(end in found[0].culprit for end in ends)
    if fault.node >= 0:
        return found[0].culprit == f"node n{fault.node:04d}"
    return found[0].ranks == ((fault.rank,) if fault.rank >= 0 else ())


def inject(name: str, seed: int) -> tuple[bool, list[Finding]]:
    """Inject a fault into a random layout; return True if it is found, and the findings."""
    draw = random.Random(f"{name} {seed}")
    kind, make = FAULTS[name]
    layout = draw.choice([each for each in LAYOUTS if name != "slow link" or each.topology.pp > 2])
    fault = make(draw, layout, draw.choice([0, 20, 40]))
    found = found_in(Fleet(layout, seed, fault))
    return is_right(fault, kind, found), found


@pytest.mark.parametrize("name", FAULTS)
def test_kind_and_culprit(name: str) -> None:
    right, found = inject(name, 1)
    assert right, [str(finding) for finding in found]
    assert len(found) == 1


@pytest.mark.slow
def test_a_hundred_faults() -> None:
    results = [inject(list(FAULTS)[seed % len(FAULTS)], seed) for seed in range(100, 200)]
    assert sum(right for right, _ in results) >= 95


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_fleet(seed: int) -> None:
    assert found_in(Fleet(LAYOUTS[seed % len(LAYOUTS)], seed)) == []


def test_a_healthy_fleet_of_uneven_work() -> None:
    work = np.random.default_rng(1).uniform(0.7, 1.5, 100)
    assert found_in(Fleet(LAYOUTS[0], 1, work=work)) == []


def test_single_slow_steps() -> None:
    fleet = Fleet(LAYOUTS[3], 2)
    columns = fleet.tables["steps"]
    columns["train_ns"][np.isin(columns["step"], [40, 70])] *= 3
    (finding,) = found_in(fleet)
    assert finding.kind == "steps"
    assert "2 of 100 steps" in finding.evidence[0]
    assert "40, 70" in finding.evidence[0]


def test_all_ranks_wait_for_data() -> None:
    (finding,) = found_in(Fleet(LAYOUTS[3], 3, Fault("data", share=5)))
    assert (finding.kind, finding.culprit, finding.ranks) == ("data", "all ranks", ())


def test_slow_groups_are_found_once() -> None:
    (finding,) = found_in(Fleet(LAYOUTS[0], 4, Fault("dp_group", rank=2, factor=3)))
    assert finding.kind == "communication"
    assert finding.ranks == tuple(range(2, 64, 4))


def test_a_store_has_the_same_findings(tmp_path: Path) -> None:
    fleet = Fleet(LAYOUTS[4], 5, Fault("slow", rank=11, factor=1.5, since=30))
    write_store(fleet, tmp_path)
    assert findings(open_store(tmp_path)) == found_in(fleet)


def test_a_run_without_steps_has_no_findings(tmp_path: Path) -> None:
    fleet = Fleet(LAYOUTS[3], 6)
    fleet.tables = {"ranks": fleet.tables["ranks"]}
    write_store(fleet, tmp_path)
    assert findings(open_store(tmp_path)) == []


@pytest.mark.slow
def test_a_job_of_12288_ranks(tmp_path: Path) -> None:
    layout = Layout(Topology(tp=8, pp=8, dp=192), chunks=3, steps=12)
    write_store(Fleet(layout, 7, Fault("slow", rank=12_287, factor=1.15), events=1), tmp_path)
    (finding,) = findings(open_store(tmp_path))
    assert (finding.kind, finding.ranks) == ("compute", (12_287,))
