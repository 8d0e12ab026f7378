"""The delay matrix tells a slow node from a slow link, by the messages of the neighbours."""

from __future__ import annotations

import numpy as np
import pytest

from lab.fleet import Fleet
from lab.fleet_times import FleetFault, FleetLayout
from megascale.layout.topology import Topology
from megascale.operate.diagnose.slow.delay_matrix import DelayMatrix, delay_matrix
from megascale.operate.diagnose.slow.step_cube import Places

NODES_OF_4 = FleetLayout(Topology(tp=4, pp=4, dp=4), node_ranks=4, steps=12)


def matrix(layout: FleetLayout, fault: FleetFault) -> DelayMatrix:
    fleet = Fleet(layout, 1, fault)
    return delay_matrix(fleet.tables["events"], Places.from_table(fleet.tables["ranks"]))


@pytest.mark.parametrize(
    "layout", [NODES_OF_4, FleetLayout(Topology(tp=2, pp=4, dp=2), chunks=2, node_ranks=2, steps=12)]
)
def test_healthy_links(layout: FleetLayout) -> None:
    found = matrix(layout, FleetFault())
    assert not found.slow.any()
    assert found.culprits == ()


def test_a_slow_node() -> None:
    (found,) = matrix(NODES_OF_4, FleetFault("link", node=5, factor=4)).culprits
    assert (found.kind, found.name, found.ranks) == ("node", "node n0005", (20, 21, 22, 23))
    assert found.delay_s == pytest.approx(4 * found.peer_s, rel=0.1)


def test_a_slow_link() -> None:
    (found,) = matrix(NODES_OF_4, FleetFault("link", node=5, peer=9, factor=4)).culprits
    assert (found.kind, found.name) == ("link", "link node n0005 - node n0009")
    assert found.per_step_s == pytest.approx(8 * 3 * 0.0004, rel=0.1)  # 8 micro-batches, 3 times longer


def test_a_node_that_sends_slowly() -> None:
    layout = NODES_OF_4
    fleet = Fleet(layout, 2)
    events = fleet.tables["events"]
    node = events["rank"] // 4
    receives = (events["name"] == "receive") & (events["peer"] // 4 == 6)
    events["end_ns"][receives] += 2_000_000
    (found,) = delay_matrix(events, Places.from_table(fleet.tables["ranks"])).culprits
    assert (found.kind, found.name) == ("send", "node n0006")
    assert set(node[receives].tolist()) == {2, 10}


@pytest.mark.parametrize(("steps", "named"), [(range(1, 13), True), (range(5, 6), False)])
def test_a_link_that_holds_up_some_messages_of_each_step(steps: range, named: bool) -> None:
    """Small messages pass its burst, and one in eight waits behind large ones. A single hold-up is chance."""
    fleet = Fleet(NODES_OF_4, 2)
    events = fleet.tables["events"]
    held = (events["name"] == "receive") & (events["rank"] // 4 == 9) & (events["peer"] // 4 == 5)
    events["end_ns"][held & (events["microbatch"] == 3) & np.isin(events["step"], steps)] += 40_000_000
    found = delay_matrix(events, Places.from_table(fleet.tables["ranks"])).culprits
    assert [path.name for path in found] == ["link node n0005 - node n0009"] * named


def test_ranks_of_one_node_are_told_apart() -> None:
    layout = FleetLayout(Topology(tp=1, pp=4, dp=2), node_ranks=8, steps=12)
    fleet = Fleet(layout, 3)
    events = fleet.tables["events"]
    events["end_ns"][(events["name"] == "receive") & (events["rank"] == 4) & (events["peer"] == 2)] += 5_000_000
    (found,) = delay_matrix(events, Places.from_table(fleet.tables["ranks"])).culprits
    assert (found.kind, found.name, found.ranks) == ("link", "link rank 2 - rank 4", (2, 4))


def test_a_message_of_one_side_is_left_out() -> None:
    fleet = Fleet(NODES_OF_4, 4)
    events = fleet.tables["events"]
    kept = ~((events["name"] == "send") & (events["rank"] == 0))
    found = delay_matrix({name: column[kept] for name, column in events.items()},
                         Places.from_table(fleet.tables["ranks"]))  # fmt: skip
    assert 0 not in found.sender
    assert len(found.to_json()["delay_s"]) == len(found.sender) == 95


def test_no_messages() -> None:
    fleet = Fleet(FleetLayout(Topology(dp=4), steps=12), 5)
    places = Places.from_table(fleet.tables["ranks"])
    empty = {name: column[:0] for name, column in Fleet(NODES_OF_4, 1).tables["events"].items()}
    assert delay_matrix(empty, places).culprits == ()
