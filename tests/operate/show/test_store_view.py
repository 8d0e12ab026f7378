"""What the views show of an event store: the numbers of the analyses, by rank."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lab.fleet_tables import write_store
from lab.fleet_times import FleetFault
from megascale.core.storage import Location
from megascale.operate.show.store_view import read_store_view
from megascale.operate.store.table_files import TableFile, write_rows
from tests.operate.show.folders import make_run
from tests.operate.show.stores import make_stored_run, store_host_metrics, store_loads
from tests.operate.store.tables import rows


def test_a_slow_rank_is_slow_in_every_part_of_the_view(tmp_path: Path) -> None:
    run, _ = make_stored_run(tmp_path)
    view = read_store_view(run)
    assert view is not None
    assert view.slowness[5] == pytest.approx(0.2, abs=0.03)
    assert np.abs(np.delete(view.slowness, 5)).max() < 0.03
    assert view.marked.tolist() == view.slowness.tolist()
    assert [finding.culprit.ranks for finding in view.findings] == [(5,)]
    assert [outlier.culprit.ranks for outlier in view.heat.outliers] == [(5,)]
    assert view.nodes == ("n0000",) * 4 + ("n0001",) * 4
    assert view.memory.tolist() == [0.0] * 8
    assert view.breakdown is not None
    assert (view.breakdown.first_step, view.breakdown.last_step) == (1, 60)
    assert view.breakdown.seconds["bubble"] > 0, "from the schedule of the run's configuration"
    assert view.hosts is None, "without metrics"


def test_an_overloaded_expert_is_named_after_what_slows_the_run(tmp_path: Path) -> None:
    run, _ = make_stored_run(tmp_path)
    assert (view := read_store_view(run)) is not None and not len(view.experts.steps), "without experts"
    loads = np.ones((4, 3, 8))
    loads[:, 1, 5] = 4.0
    store_loads(run, loads)
    view = read_store_view(run)
    assert view is not None
    assert view.experts.loads.tolist() == loads.tolist()
    slow, unbalanced = view.verdicts
    assert slow.startswith("rank 5: computes slowly")
    assert unbalanced == "layer 1 expert 5: takes more tokens than its share, since step 1"


def test_ranks_that_share_cores_are_marked_for_large_costs_only(tmp_path: Path) -> None:
    for factor, marked in ((1.2, []), (1.5, [5])):
        run, fleet = make_stored_run(tmp_path / str(factor), FleetFault("slow", rank=5, factor=factor))
        fleet.tables["ranks"] |= {"host": np.full(8, "h", object), "cores": np.full(8, 2)}
        write_store(fleet, run)
        view = read_store_view(run)
        assert view is not None and view.crowded
        assert np.flatnonzero(view.marked > 0).tolist() == marked


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
