"""Analyses of a run that goes on: when they are made again, what is told about them, and how they end."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import duckdb
import pytest

from lab.fleet_times import FleetFault
from megascale.core.storage import Location
from megascale.operate.show import store_follower, store_view
from megascale.operate.show.store_follower import StoreFollower
from megascale.operate.store.query import fetch
from megascale.operate.store.table_files import TableFile, write_rows
from tests.operate.show.folders import make_run
from tests.operate.show.stores import make_stored_run
from tests.operate.store.tables import rows


def test_a_bug_in_an_analysis_is_told_and_the_next_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors, told, again = [ValueError("a bug"), None], list[str](), threading.Event()

    def fail_at_first(folder: Path, *arguments: object) -> None:
        assert folder == run, "an analysis of another test, which has ended"
        if error := errors.pop(0):
            write_rows(Location(f"{run}/events"), TableFile("states", "n0", 0, 1, 2), rows("states", 1))
            raise error
        told.append(follower.error)
        again.set()

    monkeypatch.setattr(store_follower, "read_store_view", fail_at_first)
    monkeypatch.setattr(store_follower, "LEAST_PAUSE_S", 0.01)
    run, _ = make_stored_run(tmp_path, FleetFault(), steps=2)
    follower = StoreFollower(run)
    follower.start()
    assert again.wait(60), follower.error
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
