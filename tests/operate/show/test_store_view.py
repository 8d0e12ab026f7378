"""What the views show of an event store: the numbers of the analyses, by rank."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path

import duckdb
import numpy as np
import pytest

from lab.fleet_times import FleetFault
from megascale.core.storage import Location
from megascale.operate.show import store_follower, store_view
from megascale.operate.show.store_follower import StoreFollower
from megascale.operate.show.store_view import read_store_view
from megascale.operate.store.query import fetch
from megascale.operate.store.table_files import TableFile, write_rows
from tests.operate.show.folders import make_run
from tests.operate.show.stores import make_stored_run, store_host_metrics
from tests.operate.store.tables import rows


def test_a_slow_rank_is_slow_in_every_part_of_the_view(tmp_path: Path) -> None:
    run, _ = make_stored_run(tmp_path)
    view = read_store_view(run)
    assert view is not None
    assert view.slowness[5] == pytest.approx(0.2, abs=0.03)
    assert np.abs(np.delete(view.slowness, 5)).max() < 0.03
    assert [finding.culprit.ranks for finding in view.findings] == [(5,)]
    assert [outlier.culprit.ranks for outlier in view.heat.outliers] == [(5,)]
    assert view.nodes == ("n0000",) * 4 + ("n0001",) * 4
    assert view.memory.tolist() == [0.0] * 8
    assert view.breakdown is not None
    assert (view.breakdown.first_step, view.breakdown.last_step) == (1, 60)
    assert view.breakdown.seconds["bubble"] > 0, "from the schedule of the run's configuration"
    assert view.hosts is None, "without metrics"


@pytest.mark.parametrize("how", ["damaged", "absent"])
def test_ranks_of_which_the_store_knows_no_place(how: str, tmp_path: Path) -> None:
    """A node's file of `ranks` is damaged, or was removed: its ranks have steps."""
    run, fleet = make_stored_run(tmp_path, FleetFault())
    (whole,) = (run / "events" / "ranks").iterdir()
    whole.unlink()
    store = Location(f"{run}/events")
    for node in range(2):
        mine = fleet.tables["ranks"]["rank"] // 4 == node
        columns = {name: column[mine] for name, column in fleet.tables["ranks"].items()}
        write_rows(store, TableFile("ranks", f"n{node}", 0, 0, 1), columns)
    file = store / TableFile("ranks", "n1", 0, 0, 1).path
    if how == "damaged":
        file.write(file.read()[:50])
    else:
        file.remove()
    view = read_store_view(run)
    assert view is not None
    assert [len(each) for each in (view.slowness, view.memory, view.nodes)] == [8, 8, 8]
    assert np.isnan(view.slowness[4:]).all() and not np.isnan(view.slowness[:4]).any()
    assert [str(file) in note for note in view.notes] == [True] * (how == "damaged")
    assert view.breakdown is not None
    assert "bubble" not in view.breakdown.seconds
    assert "the bubble is not computed: the store has no ordinary step of pipeline stage 1" in view.breakdown.remarks
    assert "nan" not in json.dumps(view.breakdown.to_json()).lower()


def test_hosts_are_compared_by_their_metrics(tmp_path: Path) -> None:
    run, _ = make_stored_run(tmp_path)
    store_host_metrics(run, hosts=5, low=2)
    view = read_store_view(run)
    assert view is not None and view.hosts is not None
    assert [each.node for each in view.hosts.outliers] == ["n2"]


def test_a_healthy_run_has_no_findings(tmp_path: Path) -> None:
    view = read_store_view(make_stored_run(tmp_path, FleetFault())[0])
    assert view is not None
    assert (view.findings, view.heat.outliers) == ((), ())


@pytest.mark.parametrize("tables", [("ranks",), ("steps",), ("steps", "step_parts")], ids=" ".join)
def test_before_the_first_step_of_a_known_rank_there_is_no_view(tables: tuple[str, ...], tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for table in tables:
        columns = rows(table, 1) if table == "ranks" else rows(table, 1, step=1)
        write_rows(Location(f"{run}/events"), TableFile(table, "n", 0, 0, 1), columns)
    assert read_store_view(run) is None


def test_a_bug_in_an_analysis_is_told_and_the_next_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors, told, again = [ValueError("a bug"), None], list[str](), threading.Event()

    def fail_at_first(*arguments: object) -> None:
        if error := errors.pop(0):
            write_rows(Location(f"{run}/events"), TableFile("states", "n0", 0, 1, 2), rows("states", 1))
            raise error
        told.append(follower.error)
        again.set()

    monkeypatch.setattr(store_follower, "read_store_view", fail_at_first)
    monkeypatch.setattr(store_follower, "LEAST_PAUSE_S", 0.01)
    run, _ = make_stored_run(tmp_path, FleetFault(), steps=2)
    follower = StoreFollower(run).start()
    assert again.wait(60)
    follower.stop()
    assert "an analysis has failed: ValueError('a bug')" in told[0]
    assert follower.error == ""


def test_the_end_waits_for_an_analysis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread in DuckDB's code would abort a process that ends."""
    began, ended = threading.Event(), threading.Event()

    def analyse(*arguments: object) -> None:
        began.set()
        time.sleep(0.2)
        ended.set()

    monkeypatch.setattr(store_follower, "read_store_view", analyse)
    follower = StoreFollower(make_run(tmp_path)).start()
    assert began.wait(60)
    follower.stop()
    assert ended.is_set()
    StoreFollower(tmp_path).stop()  # without a start


def test_the_end_interrupts_a_long_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C does not wait for the analysis of a large job."""
    began = threading.Event()

    def analyse(store: duckdb.DuckDBPyConnection, folder: Path) -> None:
        began.set()
        fetch(store, "SELECT sum(a.range * b.range) AS s FROM range(10000000) a, range(10000000) b")

    run, _ = make_stored_run(tmp_path, FleetFault(), steps=20)
    with monkeypatch.context() as patched:
        patched.setattr(store_view, "_analyse", analyse)
        follower = StoreFollower(run).start()
        assert began.wait(60)
        follower.stop()
    assert "no analyses: the event store cannot be read: INTERRUPT" in follower.note
    assert not follower._thread.is_alive()
    follower.refresh()
    assert follower.latest is not None, "the run has ended: its last analysis is made"


def test_the_end_of_a_run_hastens_the_next_analysis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_follower, "LEAST_PAUSE_S", 3600.0)
    monkeypatch.setattr(store_follower, "MOST_PAUSE_S", 3600.0)
    monkeypatch.setattr(store_follower, "read_store_view", lambda *arguments: None)
    run, done = make_run(tmp_path), threading.Event()
    follower = StoreFollower(run)
    monkeypatch.setattr(follower, "refresh", done.set)
    follower.start()
    for _ in range(3):
        assert done.wait(60)
        done.clear()
        follower.hasten()
    follower.stop()


def test_a_note_says_how_old_the_analyses_are(tmp_path: Path) -> None:
    run, _ = make_stored_run(tmp_path, FleetFault(), steps=20)
    follower = StoreFollower(run)
    assert follower.note == "no analyses: the event store is being read"
    follower.refresh()
    follower.analysed -= 42
    assert follower.note == "analysed 42s ago, up to step 20"
    file = next((run / "events" / "steps").iterdir())
    file.write_bytes(b"")
    (run / "events" / "steps" / "other").touch()
    follower.refresh()
    assert re.fullmatch(rf"analysed \d+s ago, up to step 20; {file} is damaged; .*", follower.note)
    empty = StoreFollower(make_run(tmp_path / "empty"))
    empty.refresh()
    assert "no event store" in empty.note


def test_a_store_is_analysed_again_when_it_has_new_files_only(tmp_path: Path) -> None:
    run, _ = make_stored_run(tmp_path, FleetFault(), steps=20)
    follower = StoreFollower(run)
    follower.refresh()
    first = follower.latest
    assert first is not None
    follower.refresh()
    assert follower.latest is first
    write_rows(Location(f"{run}/events"), TableFile("states", "n0", 0, 1, 2), rows("states", 1))
    follower.refresh()
    assert follower.latest is not first
    assert follower.version == 2


def test_a_run_without_a_store_says_so_and_is_asked_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    follower = StoreFollower(run).start()
    deadline = time.monotonic() + 60
    while not follower.error:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    follower.ended.set()
    assert "no event store" in follower.error
    make_stored_run(tmp_path / "other")
    (tmp_path / "other" / "runs" / "test" / "events").rename(run / "events")
    follower.refresh()
    assert (follower.error, follower.latest is not None) == ("", True)
