"""The delays of messages tell a slow node from a slow link, whose cost is what the job loses; no link of a healthy job
is named, however delays vary.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.fleet import Fleet
from lab.fleet_tables import cube_of
from lab.fleet_times import FleetFault, FleetLayout
from lab.observe import findings_of
from megascale.layout.topology import Topology
from megascale.operate.diagnose.slow.finding import SlowCulprit
from megascale.operate.diagnose.slow.slow_links import Messages, SlowPath, message_waits, slow_paths
from megascale.operate.diagnose.slow.step_cube import Columns, Places

NODES_OF_4 = FleetLayout(Topology(tp=4, pp=4, dp=4), node_ranks=4, steps=12)


WIDE = FleetLayout(Topology(tp=2, pp=4, dp=4), node_ranks=2, steps=60)
NARROW = FleetLayout(Topology(pp=2, dp=2), node_ranks=4, steps=60)


def messages_of(fleet: Fleet, events: Columns) -> Messages:
    return Messages.of_table(events, Places.from_table(fleet.tables["ranks"]))


def paths_of(fleet: Fleet) -> list[SlowPath]:
    return list(slow_paths(messages_of(fleet, fleet.tables["events"]), Places.from_table(fleet.tables["ranks"])))


@pytest.mark.parametrize(
    "layout", [NODES_OF_4, FleetLayout(Topology(tp=2, pp=4, dp=2), chunks=2, node_ranks=2, steps=12)]
)
def test_healthy_links(layout: FleetLayout) -> None:
    assert paths_of(Fleet(layout, 1)) == []


def test_a_slow_node() -> None:
    (found,) = paths_of(Fleet(NODES_OF_4, 1, FleetFault("link", node=5, factor=4)))
    assert (found.kind, str(found.culprit), found.culprit.ranks) == ("node", "node n0005", (20, 21, 22, 23))
    assert found.delay_s == pytest.approx(4 * found.peer_s, rel=0.1)


def test_a_slow_link() -> None:
    (found,) = paths_of(Fleet(NODES_OF_4, 1, FleetFault("link", node=5, peer=9, factor=4)))
    assert (found.kind, str(found.culprit)) == ("link", "link node n0005 - node n0009")
    assert found.per_step_s == pytest.approx(8 * 3 * 0.0004, rel=0.1)  # 8 micro-batches, 3 times longer


def test_a_node_that_sends_slowly() -> None:
    layout = NODES_OF_4
    fleet = Fleet(layout, 2)
    events = fleet.tables["events"]
    node = events["rank"] // 4
    receives = (events["name"] == "receive") & (events["peer"] // 4 == 6)
    events["end_ns"][receives] += 2_000_000
    (found,) = paths_of(fleet)
    assert (found.kind, str(found.culprit)) == ("send", "node n0006")
    assert set(node[receives].tolist()) == {2, 10}


@pytest.mark.parametrize(("steps", "named"), [(range(1, 13), True), (range(5, 6), False)])
def test_a_link_that_holds_up_some_messages_of_each_step(steps: range, named: bool) -> None:
    """Small messages pass its burst, and one in eight waits behind large ones. A single hold-up is chance."""
    fleet = Fleet(NODES_OF_4, 2)
    events = fleet.tables["events"]
    held = (events["name"] == "receive") & (events["rank"] // 4 == 9) & (events["peer"] // 4 == 5)
    events["end_ns"][held & (events["microbatch"] == 3) & np.isin(events["step"], steps)] += 40_000_000
    found = paths_of(fleet)
    assert [str(path.culprit) for path in found] == ["link node n0005 - node n0009"] * named


def test_ranks_of_one_node_are_told_apart() -> None:
    layout = FleetLayout(Topology(tp=1, pp=4, dp=2), node_ranks=8, steps=12)
    fleet = Fleet(layout, 3)
    events = fleet.tables["events"]
    events["end_ns"][(events["name"] == "receive") & (events["rank"] == 4) & (events["peer"] == 2)] += 5_000_000
    (found,) = paths_of(fleet)
    assert (found.kind, str(found.culprit), found.culprit.ranks) == ("link", "link rank 2 - rank 4", (2, 4))


def test_a_message_of_one_side_is_left_out() -> None:
    fleet = Fleet(NODES_OF_4, 4)
    events = fleet.tables["events"]
    kept = ~((events["name"] == "send") & (events["rank"] == 0))
    found = messages_of(fleet, {name: column[kept] for name, column in events.items()})
    assert 0 not in found.sender
    assert len(np.unique(found.sender * 64 + found.receiver)) == 95


def test_no_messages() -> None:
    fleet = Fleet(FleetLayout(Topology(dp=4), steps=12), 5)
    empty = {name: column[:0] for name, column in Fleet(NODES_OF_4, 1).tables["events"].items()}
    places = Places.from_table(fleet.tables["ranks"])
    assert list(slow_paths(messages_of(fleet, empty), places)) == []


@pytest.mark.parametrize("jitter", [0.3, 1.0])
@pytest.mark.parametrize("layout", [WIDE, NARROW])
def test_links_of_healthy_jobs_with_jitter_are_not_named(layout: FleetLayout, jitter: float) -> None:
    for seed in range(4):
        fleet = Fleet(replace(layout, jitter=jitter), seed, noise=0.04, hiccups=0.01)
        assert [str(one) for one in findings_of(fleet) if one.kind == "link"] == []


@pytest.mark.parametrize("fault", [
    FleetFault("link", node=5, peer=9, factor=20), FleetFault("link", node=6, factor=20),
])  # fmt: skip
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_the_cost_is_about_what_the_job_loses(fault: FleetFault, jitter: float) -> None:
    layout = replace(WIDE, jitter=jitter)
    slow, healthy = Fleet(layout, 2, fault), Fleet(layout, 2)
    (finding,) = findings_of(slow)
    assert finding.kind == "link"
    assert f"n{fault.node:04d}" in finding.culprit.nodes
    lost = float(slow.seconds.mean() - healthy.seconds.mean())
    assert 0.7 * lost < finding.cost_s < 2.5 * lost  # without steps before it the model is all that is known
    (path,) = paths_of(slow)
    assert path.per_step_s > 5 * lost  # what the messages are late is far more than what the job loses


def test_the_cost_is_measured_against_the_steps_before() -> None:
    """A link that makes steps more than twice as long costs that, of the step that it is, since its onset."""
    layout = replace(WIDE, steps=100)
    fault = FleetFault("link", node=5, peer=9, factor=600, since=40)
    slow, healthy = Fleet(layout, 2, fault, events=100), Fleet(layout, 2)
    finding = findings_of(slow)[0]
    lost = float((slow.seconds - healthy.seconds)[40:].mean())
    assert lost > 1.2 * healthy.seconds.mean()
    assert (finding.kind, abs(finding.since - 41) <= 2) == ("link", True)
    assert finding.cost_s == pytest.approx(lost, rel=0.1)
    assert finding.cost_share == pytest.approx(lost / slow.seconds[40:].mean(), rel=0.1)


def test_a_link_that_nobody_waits_for_costs_nothing() -> None:
    """The delays say slow, and the receivers wait as long as their peers."""
    fleet = Fleet(WIDE, 3)
    events = fleet.tables["events"]
    events["end_ns"][(events["name"] == "receive") & (events["peer"] // 2 == 5)] += 4_000_000
    cube = cube_of(fleet)
    paths = paths_of(fleet)
    assert [str(path.culprit) for path in paths] == ["node n0005"]
    assert message_waits(cube, paths[0]).mean() < 0.1 * paths[0].per_step_s
    assert findings_of(fleet) == []


def test_the_lateness_of_the_messages_bounds_the_cost() -> None:
    """A receiver that waits for a slow rank before it."""
    cube = cube_of(Fleet(WIDE, 4, FleetFault("slow", node=1, factor=1.5)))
    received = [at for at, part in enumerate(cube.parts) if part.name == "receive"]
    receiver = int(cube.places.rank[np.argmax(cube.wait[:, :, received].sum((1, 2)))])
    path = SlowPath("link", SlowCulprit("link", (0, receiver), ("a", "b")), 0.001, 0.0004, 0.002, (receiver,))
    assert message_waits(cube, path).max() <= 0.002
