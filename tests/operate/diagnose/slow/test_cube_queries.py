"""Cubes of a store whose run has gone back to an earlier checkpoint: what was abandoned is not analysed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from lab.fleet import Fleet
from lab.fleet_tables import PEAK_FLOPS, cube_of, write_store
from lab.fleet_times import FleetFault, FleetLayout
from megascale.core.storage import Location
from megascale.layout.topology import Topology
from megascale.operate.diagnose.slow import cube_queries
from megascale.operate.diagnose.slow.cube_queries import (
    mean_cube,
    mean_peak_flops,
    peak_flops,
    recent_cube,
    sampled_cube,
)
from megascale.operate.diagnose.slow.drift import drift
from megascale.operate.diagnose.slow.findings import findings
from megascale.operate.diagnose.slow.mfu_breakdown import mfu_breakdown
from megascale.operate.show.step_events import steps_with_events
from megascale.operate.store.query import StoreReadError, open_store
from megascale.operate.store.table_files import TableFile, write_rows
from tests.operate.store.tables import rows

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


TWO_STAGES = FleetLayout(Topology(tp=2, pp=2, dp=4), node_ranks=4, steps=60)


def write_attempt(run: Path, fleet: Fleet, attempt: int, after: int = 0, **nodes: str) -> None:
    """Write a job's tables as an attempt whose first step comes `after` others, an hour later than the last attempt;
    with other `nodes` in the place of some.
    """
    for table, columns in fleet.tables.items():
        later = {name: column.copy() for name, column in columns.items()}
        later["attempt"][:] = attempt
        for name in later.keys() & {"start_ns", "end_ns", "last_issue_ns", "issue_ns"}:
            later[name] += attempt * 3600 * 10**9
        if "step" in later:
            later["step"] += after
        if "node" in later:
            later["node"] = np.array([nodes.get(node, node) for node in later["node"].tolist()], object)
        write_rows(Location(f"{run}/events"), TableFile(table, "n0", attempt, 2, 3), later)


FAULTS = {"node": FleetFault("slow", node=1, factor=1.3), "link": FleetFault("link", node=1, peer=3, factor=60)}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_replaced_node_leaves_nothing_to_its_replacement(fault: FleetFault, tmp_path: Path) -> None:
    write_attempt(tmp_path, Fleet(TWO_STAGES, 1, fault, events=60), 0)
    with open_store(tmp_path) as store:
        assert str(findings(store)[0].culprit) in ("node n0001", "link node n0001 - node n0003")
    write_attempt(tmp_path, Fleet(TWO_STAGES, 2, events=60), 1, after=60, n0001="n0099")
    with open_store(tmp_path) as store:
        assert findings(store) == []
        assert recent_cube(store).steps.tolist() == list(range(61, 121))
        assert mean_cube(store)[0].steps.tolist() == list(range(1, 121)), "the time is that of the run"


def test_the_newest_steps_are_read_without_the_others(tmp_path: Path) -> None:
    """The rows of a long run's earlier files are no part of them: here they could not even be read."""
    fleet = Fleet(TWO_STAGES)
    parts = fleet.tables["step_parts"]
    write_store(fleet, tmp_path)
    (tmp_path / "events" / TableFile("step_parts", "n0", 0, 0, 1).path).unlink()
    for number, mine in enumerate((parts["step"] <= 30, parts["step"] > 30)):
        columns = {name: column[mine] for name, column in parts.items()}
        write_rows(Location(f"{tmp_path}/events"), TableFile("step_parts", "n0", 0, number, number + 1), columns)
    old = tmp_path / "events" / TableFile("step_parts", "n0", 0, 0, 1).path
    footer = int.from_bytes(old.read_bytes()[-8:-4], "little") + 8
    old.write_bytes(b"PAR1" + bytes(old.stat().st_size - 4 - footer) + old.read_bytes()[-footer:])
    with open_store(tmp_path) as store:
        assert recent_cube(store, 20).steps.tolist() == list(range(41, 61))
        with pytest.raises(StoreReadError):
            recent_cube(store)


def test_a_store_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Its parts of steps have no groups, its ranks no index among those that shard."""
    fleet = Fleet(TWO_STAGES, 1, FAULTS["node"], events=60)
    write_store(fleet, tmp_path)
    for table, column in (("step_parts", "group_name"), ("ranks", "dp_shard")):
        file = tmp_path / "events" / TableFile(table, "n0", 0, 0, 1).path
        pq.write_table(pq.read_table(file).drop_columns([column]), file)
    with open_store(tmp_path) as store:
        cube = recent_cube(store)
        assert [str(found.culprit) for found in findings(store)] == ["node n0001"]
        assert len(cube.parts) == len(mean_cube(store)[0].parts) == len(fleet.parts)


def test_a_sample_of_a_large_job_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cube_queries.SAMPLED_RANKS * cube_queries.SAMPLED_STEPS * 20 < cube_queries.MAX_ROWS / 4, "with 20 parts"
    monkeypatch.setattr(cube_queries, "SAMPLED_RANKS", 4)
    monkeypatch.setattr(cube_queries, "SAMPLED_STEPS", 20)
    write_attempt(tmp_path, Fleet(TWO_STAGES), 0)
    with open_store(tmp_path) as store:
        cube = sampled_cube(store)
    assert cube.places.rank.tolist() == [0, 4, 8, 12]
    assert cube.steps.tolist() == list(range(3, 61, 3))
    assert (cube.wall > 0).all() and (cube.compute > 0).all()


def test_the_newest_steps_are_as_many_as_their_rows_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(TWO_STAGES)
    write_attempt(tmp_path, fleet, 0)
    monkeypatch.setattr(cube_queries, "MAX_ROWS", 10 * int((fleet.tables["step_parts"]["step"] == 60).sum()))
    with open_store(tmp_path) as store:
        assert recent_cube(store).steps.tolist() == list(range(51, 61))


def test_a_store_and_its_tables_make_the_same_cube(tmp_path: Path) -> None:
    fleet = Fleet(TWO_STAGES)
    write_attempt(tmp_path, fleet, 0)
    with open_store(tmp_path) as store:
        found, expected = recent_cube(store), cube_of(fleet)
    assert found.parts == expected.parts
    for name in ("own", "wait", "entered_ns", "bytes"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_until_its_first_step_an_attempt_hides_nothing(tmp_path: Path) -> None:
    write_attempt(tmp_path, Fleet(TWO_STAGES), 0)
    fleet = Fleet(TWO_STAGES)
    fleet.tables = {"ranks": fleet.tables["ranks"]}
    write_attempt(tmp_path, fleet, 1, n0001="n0099")
    with open_store(tmp_path) as store:
        assert len(recent_cube(store).steps) == 60


def test_a_job_that_shrank_is_healthy_and_its_peak_smaller(tmp_path: Path) -> None:
    """After the loss of half of its replicas, FLOPs of a rank and step stay the same."""
    small = FleetLayout(Topology(tp=2, pp=2, dp=2), node_ranks=4, steps=60)
    write_attempt(tmp_path, Fleet(TWO_STAGES), 0)
    write_attempt(tmp_path, Fleet(small, 1), 1, after=60)
    with open_store(tmp_path) as store:
        assert findings(store) == []
        cube, steps = mean_cube(store)
        peak = mean_peak_flops(store, steps)
    seconds = [float(Fleet(layout).seconds.sum()) for layout in (TWO_STAGES, small)]
    assert peak == pytest.approx(np.average([16 * PEAK_FLOPS, 8 * PEAK_FLOPS], weights=seconds), rel=0.01)
    flops = sum(float(fleet.tables["steps"]["flops"][fleet.tables["steps"]["rank"] == 0].sum())
                for fleet in (Fleet(TWO_STAGES), Fleet(small, 1)))  # fmt: skip
    assert mfu_breakdown(cube, steps, peak).mfu == pytest.approx(flops / (peak * (3600 + seconds[1])), rel=0.01)


def test_the_peak_is_unknown_if_that_of_an_attempt_is(tmp_path: Path) -> None:
    write_attempt(tmp_path, Fleet(TWO_STAGES), 0)
    fleet = Fleet(TWO_STAGES)
    fleet.tables["ranks"]["peak_flops"] = np.zeros(16)
    write_attempt(tmp_path, fleet, 1, after=60)
    with open_store(tmp_path) as store:
        assert mean_peak_flops(store, mean_cube(store)[1]) == 0.0


def test_steps_beyond_the_newest_of_the_last_attempt_are_left_out(store: duckdb.DuckDBPyConnection) -> None:
    for cube in (recent_cube(store), sampled_cube(store), mean_cube(store)[0]):
        assert cube.steps.tolist() == list(range(1, LAST + 1))
    cube = recent_cube(store)
    slower = cube.compute[1] / cube.compute[0]
    assert (slower[FIRST - 1 :] > 1.3).all() and (slower[: FIRST - 1] < 1.2).all()
    assert recent_cube(store, 10).steps.tolist() == list(range(LAST - 9, LAST + 1))


def test_the_present_attempt_is_judged(store: duckdb.DuckDBPyConnection) -> None:
    worst = findings(store)[0]
    assert (worst.kind, worst.culprit.ranks) == ("compute", (1,))
    assert worst.since >= FIRST


def test_abandoned_steps_are_lost_time(store: duckdb.DuckDBPyConnection) -> None:
    cube, steps = mean_cube(store)
    found, old = mfu_breakdown(cube, steps, 1.0), Fleet(LAYOUT).seconds
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
    found = mfu_breakdown(cube, steps, 1.0)
    assert abs(found.seconds["other"]) < 0.01 * found.wall_s


def without(table: dict[str, np.ndarray], ranks: list[int], steps: range) -> dict[str, np.ndarray]:
    """The rows of a table, but for those of some ranks and steps."""
    gone = np.isin(table["rank"], ranks) & np.isin(table["step"], steps)
    return {name: column[~gone] for name, column in table.items()}


def with_whole_steps(fleet: Fleet) -> dict[str, np.ndarray]:
    """The table `step_parts` with each rank's row of a whole step."""
    steps, columns = fleet.tables["steps"], fleet.tables["step_parts"]
    more = {"axis": "step", "name": "step", "group_name": "", "chunk": -1, "count": 1, "total_ns": steps["train_ns"]}
    more |= {name: steps[name] for name in ("attempt", "rank", "step")}
    return {
        name: np.concatenate([column, np.broadcast_to(np.asarray(more.get(name, 0), column.dtype), len(steps["rank"]))])
        for name, column in columns.items()
    }


@pytest.mark.parametrize("ranks", [[3], [0, 1], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("tables", [("steps", "step_parts"), ("steps",), ("step_parts",)], ids=str)
def test_steps_with_missing_rows_are_left_out_with_their_time(
    tmp_path: Path, tables: tuple[str, ...], ranks: list[int]
) -> None:
    """As after store intervals that were dropped, or with a damaged file that is left out."""
    fleet, gone = Fleet(LAYOUT), range(40, 100)
    whole = mfu_breakdown(cube_of(fleet), fleet.tables["steps"], 1.0)
    fleet.tables["step_parts"] = with_whole_steps(fleet)
    for table in tables:
        fleet.tables[table] = without(fleet.tables[table], ranks, gone)
    write_store(fleet, tmp_path)
    with open_store(tmp_path) as store:
        found = mfu_breakdown(*mean_cube(store), 1.0)
    missed_s = float(fleet.seconds[39:99].sum())
    assert (found.first_step, found.last_step, found.steps) == (1, LAYOUT.steps, LAYOUT.steps - len(gone))
    assert found.wall_s == pytest.approx(whole.wall_s - missed_s, rel=1e-6)
    assert found.mfu == pytest.approx(whole.mfu, rel=0.02)
    assert "between steps" not in found.seconds
    assert found.seconds["forward"] / found.steps == pytest.approx(whole.seconds["forward"] / whole.steps, rel=0.02)
    assert found.remarks == (f"60 steps are left out, {missed_s:.4g} s: the store lacks rows of some ranks or of all",)
    assert found.remarks[0] in found.to_text()


def test_nothing_grows_where_the_rows_of_a_rank_begin_late(tmp_path: Path) -> None:
    fleet = Fleet(LAYOUT)
    for table in ("steps", "step_parts"):
        fleet.tables[table] = without(fleet.tables[table], [3], range(1, 61))
    write_store(fleet, tmp_path)
    with open_store(tmp_path) as store:
        found = drift(sampled_cube(store), 1.0)
    assert not found.growths and not found.spread


def test_a_step_whose_last_attempt_is_not_whole_is_not_taken_from_an_earlier_one(tmp_path: Path) -> None:
    """Rows of the newest step come later from some nodes, and an earlier attempt went farther."""
    fleet = Fleet(LAYOUT)
    write_store(fleet, tmp_path)
    steps = without(fleet.tables["steps"], [0, 1, 2, 3], range(1, 21))
    steps = without(without(steps, [2], range(30, 31)), [0, 1, 2, 3], range(31, 121))
    steps["attempt"] += 1
    for name in ("start_ns", "end_ns"):
        steps[name] += 3600 * 10**9
    write_rows(Location(f"{tmp_path}/events"), TableFile("steps", "n0", 1, 2, 3), steps)
    with open_store(tmp_path) as store:
        cube, table = mean_cube(store)
    assert cube.steps.tolist() == list(range(1, 30))
    found = mfu_breakdown(cube, table, 1.0)
    assert not found.remarks
    assert found.seconds["lost steps"] == pytest.approx(float(fleet.seconds[20:].sum()), rel=1e-6)


def test_the_peak_counts_ranks_without_a_row(tmp_path: Path) -> None:
    fleet = Fleet(LAYOUT)
    fleet.tables["ranks"] = {name: column[:3] for name, column in fleet.tables["ranks"].items()}
    write_store(fleet, tmp_path)
    with open_store(tmp_path) as store:
        assert peak_flops(store) == pytest.approx(4 * PEAK_FLOPS)


def test_the_timeline_offers_steps_of_the_last_attempt(run: Path) -> None:
    columns = {"rank": 0, "axis": "compute", "name": "F"}
    for attempt, step in ((0, 110), (1, 30)):
        events = rows("events", 1, attempt=attempt, step=step, **columns)
        write_rows(Location(f"{run}/events"), TableFile("events", "n1", attempt, 5, 6), events)
    assert steps_with_events(run) == [30]
