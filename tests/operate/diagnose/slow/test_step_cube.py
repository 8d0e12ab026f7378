"""The cube of a store with late events, and of a run with several attempts."""

from __future__ import annotations

import numpy as np
import pytest

from lab.fleet import Fleet
from lab.fleet_tables import cube_of
from lab.fleet_times import FleetLayout
from megascale.layout.topology import AXES, DATA_AXES, Topology
from megascale.operate.diagnose.slow.step_cube import Columns, Places, StepCube

LAYOUT = FleetLayout(Topology(dp=4), node_ranks=2, steps=20)


def joined(*tables: Columns) -> Columns:
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def changed(table: Columns, rows: np.ndarray, **columns: object) -> Columns:
    """The chosen rows, with other values in some columns."""
    chosen = {name: column[rows] for name, column in table.items()}
    return chosen | {name: np.full(int(rows.sum()), value, chosen[name].dtype) for name, value in columns.items()}


def test_a_late_event_adds_to_its_part() -> None:
    fleet = Fleet(LAYOUT)
    whole, parts = cube_of(fleet), fleet.tables["step_parts"]
    halves = dict(parts)
    for name in ("total_ns", "exposed_ns", "bytes"):
        halves[name] = parts[name] // 2
    rest = halves | {name: parts[name] - halves[name] for name in ("total_ns", "exposed_ns", "bytes")}
    cube = StepCube.from_tables(joined(halves, rest), fleet.tables["steps"], fleet.tables["ranks"])
    np.testing.assert_allclose(cube.own, whole.own, rtol=1e-6)
    np.testing.assert_allclose(cube.wait, whole.wait, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(cube.bytes, whole.bytes)


def test_a_step_counts_in_the_last_attempt_that_ran_it() -> None:
    fleet = Fleet(LAYOUT)
    steps, parts, ranks = (fleet.tables[name] for name in ("steps", "step_parts", "ranks"))
    every = np.ones(len(ranks["rank"]), bool)
    again = changed(steps, steps["step"] > 10, attempt=1, train_ns=7_000_000_000)
    parts_again = changed(parts, parts["step"] > 10, attempt=1, total_ns=5_000_000_000, exposed_ns=0)
    cube = StepCube.from_tables(
        joined(parts, parts_again), joined(steps, again), joined(ranks, changed(ranks, every, attempt=1))
    )
    np.testing.assert_allclose(cube.wall[:, 10:], 7.0)
    assert (cube.wall[:, :10] < 1).all()
    assert (cube.own[:, 10:, cube.select("compute", "F")] == 5.0).all()
    np.testing.assert_allclose(cube.own[:, :10], cube_of(fleet).own[:, :10])


@pytest.mark.parametrize(
    "topology",
    [
        Topology(tp=2, dp=4, pp=2, ep=4), Topology(tp=2, cp=2, dp=2, ep=2), Topology(dp=3),
        Topology(tp=2, cp=2, dp=6, pp=2, ep=2, dp_replicate=3),
    ],
)  # fmt: skip
def test_groups_are_those_of_the_layout(topology: Topology) -> None:
    ranks = np.arange(topology.world_size)
    coords = [topology.coord(rank) for rank in range(topology.world_size)]
    of_axes = {axis: np.array([getattr(coord, axis) for coord in coords]) for axis in AXES}
    of_axes |= {
        axis: np.array([topology.index_in_group(coord, axis) for coord in coords]) for axis in ("ep", "dp_shard")
    }
    places = Places(ranks, ranks * 0, ("n0",), of_axes)
    inner = {"dp.shard": ("cp", "dp_shard"), "edp.shard": ("edp_shard",), "dp.replicate": ("dp_replicate",)}
    along_axes = {axis: (axis,) for axis in ("tp", "pp", "ep", "edp")} | {"dp": DATA_AXES} | inner
    for axis, along in along_axes.items():
        codes = places.group_codes(axis)
        for rank in range(topology.world_size):
            assert np.flatnonzero(codes == codes[rank]).tolist() == topology.group(rank, *along), (axis, rank)
