"""What the views show of an event store: the numbers of the analyses, by rank."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from megascale.bench.fleet_times import FleetFault
from megascale.core.storage import Location
from megascale.eventstore.table_files import TableFile, write_rows
from megascale.view import store_view
from megascale.view.store_view import StoreFollower, read_store_view
from tests.eventstore.tables import rows
from tests.view.folders import make_run
from tests.view.stores import make_stored_run


def test_a_slow_rank_is_slow_in_every_part_of_the_view(tmp_path: Path) -> None:
    run, _ = make_stored_run(tmp_path)
    view = read_store_view(run)
    assert view is not None
    assert view.slowness[5] == pytest.approx(0.2, abs=0.03)
    assert np.abs(np.delete(view.slowness, 5)).max() < 0.03
    assert [finding.ranks for finding in view.findings] == [(5,)]
    assert [outlier.ranks for outlier in view.heat.outliers] == [(5,)]
    assert view.nodes == ("n0000",) * 4 + ("n0001",) * 4
    assert view.memory.tolist() == [0.0] * 8
    assert view.breakdown is not None
    assert (view.breakdown.first_step, view.breakdown.last_step) == (1, 60)
    assert view.breakdown.seconds["bubble"] > 0, "from the schedule of the run's configuration"


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


def test_a_bug_in_an_analysis_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(store_view, "read_store_view", fail)
    follower = StoreFollower(make_stored_run(tmp_path)[0])
    with pytest.raises(ValueError, match="a bug"):
        follower._follow()
    assert "no longer read: ValueError('a bug')" in follower.error


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
