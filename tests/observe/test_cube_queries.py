"""Cubes of a store whose run has gone back to an earlier checkpoint: what was abandoned is not analysed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pytest

from megascale.bench.fleet import Fleet
from megascale.bench.fleet_tables import write_store
from megascale.bench.fleet_times import FleetFault, FleetLayout
from megascale.core.storage import Location
from megascale.eventstore.query import open_store
from megascale.eventstore.table_files import TableFile, write_rows
from megascale.layout.topology import Topology
from megascale.observe.cube_queries import mean_cube, recent_cube, sampled_cube
from megascale.observe.findings import findings
from megascale.observe.mfu_ledger import mfu_ledger
from megascale.view.step_events import steps_with_events
from tests.eventstore.tables import rows

LAYOUT = FleetLayout(Topology(dp=4), node_ranks=2, steps=120)
FIRST, LAST = 21, 80
"""Steps of the later attempt, which went back to step 20 after the first one had come to step 120."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A healthy attempt, and a later one of which rank 1 computes half as long again."""
    write_store(Fleet(LAYOUT), tmp_path)
    for table, columns in Fleet(LAYOUT, 0, FleetFault("slow", rank=1, factor=1.5)).tables.items():
        later = {name: column.copy() for name, column in columns.items()}
        if table != "ranks":
            mine = (later["step"] >= FIRST) & (later["step"] <= LAST)
            later = {name: column[mine] for name, column in later.items()}
        for name in later.keys() & {"start_ns", "end_ns", "last_issue_ns", "issue_ns"}:
            later[name] += 3600 * 10**9
        later["attempt"][:] = 1
        if len(later["rank"]):
            write_rows(Location(f"{tmp_path}/events"), TableFile(table, "n0", 1, 2, 3), later)
    return tmp_path


@pytest.fixture
def store(run: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    with open_store(run) as connection:
        yield connection


def test_steps_beyond_the_newest_of_the_last_attempt_are_left_out(store: duckdb.DuckDBPyConnection) -> None:
    for cube in (recent_cube(store), sampled_cube(store), mean_cube(store)[0]):
        assert cube.steps.tolist() == list(range(1, LAST + 1))
    cube = recent_cube(store)
    slower = cube.compute[1] / cube.compute[0]
    assert (slower[FIRST - 1 :] > 1.3).all() and (slower[: FIRST - 1] < 1.2).all()
    assert recent_cube(store, 10).steps.tolist() == list(range(LAST - 9, LAST + 1))


def test_the_present_attempt_is_judged(store: duckdb.DuckDBPyConnection) -> None:
    worst = findings(store)[0]
    assert (worst.kind, worst.ranks) == ("compute", (1,))
    assert worst.since >= FIRST


def test_abandoned_steps_are_lost_time(store: duckdb.DuckDBPyConnection) -> None:
    cube, steps = mean_cube(store)
    found, old = mfu_ledger(cube, steps, 1.0), Fleet(LAYOUT).seconds
    assert (found.first_step, found.last_step, found.steps) == (1, LAST, LAST)
    assert found.seconds["lost steps"] == pytest.approx(float(np.sum(old[FIRST - 1 :])), rel=1e-6)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s)


def test_steps_that_not_all_ranks_have_are_no_part_of_means(tmp_path: Path) -> None:
    """A killed rank's last rows are missing: the others' steps would be compared with fewer events."""
    fleet = Fleet(LAYOUT)
    for table in ("steps", "step_parts"):
        columns = fleet.tables[table]
        kept = (columns["rank"] != 3) | (columns["step"] < LAYOUT.steps)
        fleet.tables[table] = {name: column[kept] for name, column in columns.items()}
    write_store(fleet, tmp_path)
    with open_store(tmp_path) as store:
        cube, steps = mean_cube(store)
    assert cube.steps.tolist() == list(range(1, LAYOUT.steps))
    found = mfu_ledger(cube, steps, 1.0)
    assert abs(found.seconds["other"]) < 0.01 * found.wall_s


def test_the_timeline_offers_steps_of_the_last_attempt(run: Path) -> None:
    columns = {"rank": 0, "axis": "compute", "name": "F"}
    for attempt, step in ((0, 110), (1, 30)):
        events = rows("events", 1, attempt=attempt, step=step, **columns)
        write_rows(Location(f"{run}/events"), TableFile("events", "n1", attempt, 5, 6), events)
    assert steps_with_events(run) == [30]
