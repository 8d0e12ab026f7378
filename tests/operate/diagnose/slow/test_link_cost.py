"""The cost of a slow link is what the job loses, and no link of a healthy job is named, however delays vary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.fleet import Fleet
from lab.fleet_tables import cube_of
from lab.fleet_times import FleetFault, FleetLayout
from lab.observe import findings_of
from megascale.layout.topology import Topology
from megascale.operate.diagnose.slow.delay_matrix import SlowPath, delay_matrix
from megascale.operate.diagnose.slow.link_cost import message_waits

WIDE = FleetLayout(Topology(tp=2, pp=4, dp=4), node_ranks=2, steps=60)
NARROW = FleetLayout(Topology(pp=2, dp=2), node_ranks=4, steps=60)


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
    assert f"node n{fault.node:04d}" in finding.culprit
    lost = float(slow.seconds.mean() - healthy.seconds.mean())
    assert 0.7 * lost < finding.cost_s < 2.5 * lost  # without steps before it the model is all that is known
    (path,) = delay_matrix(slow.tables["events"], cube_of(slow).places).culprits
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
    culprits = delay_matrix(events, cube.places).culprits
    assert [path.name for path in culprits] == ["node n0005"]
    assert message_waits(cube, culprits[0]).mean() < 0.1 * culprits[0].per_step_s
    assert findings_of(fleet) == []


def test_the_lateness_of_the_messages_bounds_the_cost() -> None:
    """A receiver that waits for a slow rank before it."""
    cube = cube_of(Fleet(WIDE, 4, FleetFault("slow", node=1, factor=1.5)))
    received = [at for at, part in enumerate(cube.parts) if part.name == "receive"]
    receiver = int(cube.places.rank[np.argmax(cube.wait[:, :, received].sum((1, 2)))])
    path = SlowPath("link", ("a", "b"), (0, receiver), 0.001, 0.0004, 0.002, (receiver,))
    assert message_waits(cube, path).max() <= 0.002
