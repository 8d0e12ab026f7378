"""The collector of a node: nothing of a rank's end is lost, and a store that fails disturbs nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megascale.core.storage import Location
from megascale.operate.store import collector as collector_module
from megascale.operate.store import node_store
from megascale.operate.store.collector import Collector, CollectorThread
from megascale.operate.store.node_store import NodeStore
from megascale.operate.store.query import StoreError, open_store
from megascale.operate.store.table_files import begin_attempt
from megascale.record.layout import Phase
from megascale.record.rank_state import RankState
from tests.operate.store.played_ranks import EPOCH_NS, PlayedRank


@pytest.fixture
def ranks(tmp_path: Path) -> list[PlayedRank]:
    return [PlayedRank(tmp_path, rank, tmp_path / "run" / "events", ready=False) for rank in range(2)]


def collector_of(ranks: list[PlayedRank], said: list[str] | None = None) -> Collector:
    return Collector({rank.rank: rank.path for rank in ranks}, (said if said is not None else []).append)


def collect(collector: Collector) -> None:
    collector.poll()
    collector.read_states()
    collector.write()


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    return open_store(folder / "run").execute(sql).fetchall()


def test_a_node_s_ranks_are_collected(ranks: list[PlayedRank], tmp_path: Path) -> None:
    collector = collector_of(ranks)
    for rank in ranks:
        rank.begin()
        rank.compute(1, "F", 1.0, 2.0 + rank.rank)
        rank.end_step(1)
    collector.add_host_metrics({"cpu.percent": 30.0, "cpu.load": 1.5})
    collect(collector)
    for rank in ranks:
        rank.end_step(2)
    collect(collector)
    found = query(tmp_path, "SELECT rank, step, total_ns FROM step_parts WHERE axis = 'compute' ORDER BY rank")
    assert found == [(0, 1, 10**9), (1, 1, 2 * 10**9)]
    assert query(tmp_path, "SELECT rank, step FROM steps ORDER BY ALL") == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert query(tmp_path, "SELECT rank, tp, node, peak_flops, world FROM ranks ORDER BY ALL") == [
        (0, 0, "node-a", 1e12, 2), (1, 1, "node-a", 1e12, 2),
    ]  # fmt: skip
    assert query(tmp_path, "SELECT metric, value FROM host_metrics ORDER BY ALL") == [
        ("cpu.load", 1.5), ("cpu.percent", 30.0),
    ]  # fmt: skip
    [(record,)] = query(tmp_path, "SELECT record FROM states WHERE rank = 1")
    assert RankState.from_dict(json.loads(record)).phase == "step"


def test_states_are_stored_before_training_begins_and_events_after(ranks: list[PlayedRank], tmp_path: Path) -> None:
    """The attempt's number is known once training begins: the states move to that attempt."""
    collector = collector_of(ranks)
    ranks[0].communicate(0, 0, 1.0, 2.0)
    collect(collector)
    assert query(tmp_path, "SELECT attempt, rank FROM states ORDER BY ALL") == [(0, 0), (0, 1)]
    assert query(tmp_path, "SELECT count(*) FROM events") == [(0,)]
    for rank in ranks:
        rank.begin(attempt=4)
    collect(collector)
    assert query(tmp_path, "SELECT attempt, rank FROM states ORDER BY ALL") == [(4, 0), (4, 1)]
    assert query(tmp_path, "SELECT attempt, name, start_ns FROM events") == [(4, "all_gather", EPOCH_NS + 10**9)]


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.operate.store.played_ranks import PlayedRank
rank = PlayedRank(Path(sys.argv[1]), 1, sys.argv[2])
rank.end_step(5)
rank.compute(6, "B", 1.0, 2.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_last_events_of_a_killed_rank_are_stored(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(tmp_path / "run/events")], check=False)
    CollectorThread(Collector({1: tmp_path / "rank-1.flight"}, print), print).finish()
    assert query(tmp_path, "SELECT step, name FROM step_parts ORDER BY step") == [(5, "step"), (6, "B")]
    assert query(tmp_path, "SELECT rank FROM states") == [(1,)]


def test_a_store_that_cannot_be_written_is_said_once_and_its_rows_wait(
    ranks: list[PlayedRank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    collector = collector_of(ranks, said)

    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    ranks[0].begin()
    with monkeypatch.context() as patched:
        patched.setattr(node_store, "write_rows", full)
        for step in range(1, 4):
            ranks[0].end_step(step)
            collect(collector)
    assert len(said) == 1 and "No space left on device" in said[0]
    collect(collector)
    assert query(tmp_path, "SELECT step FROM steps ORDER BY step") == [(1,), (2,), (3,)]
    assert len(said) == 1, "no interval was lost"


def test_rows_of_a_long_outage_are_dropped(
    ranks: list[PlayedRank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    collector = collector_of(ranks, said)
    monkeypatch.setattr(collector_module, "MAX_INTERVALS_WAITING", 2)
    ranks[0].begin()
    with monkeypatch.context() as patched:
        patched.setattr(NodeStore, "write", lambda *a: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        for step in range(1, 6):
            ranks[0].end_step(step)
            collect(collector)
    collect(collector)
    assert query(tmp_path, "SELECT step FROM steps ORDER BY step") == [(5,)]
    assert said[1:] == ["the event store is written again; the rows of 4 intervals are missing"]


def test_rows_that_never_reached_the_store_are_counted_at_the_end(
    ranks: list[PlayedRank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(collector_module, "MAX_INTERVALS_WAITING", 2)
    monkeypatch.setattr(NodeStore, "write", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    collector = collector_of(ranks, said)
    ranks[0].begin()
    for step in range(1, 4):
        ranks[0].end_step(step)
        collect(collector)
    CollectorThread(collector, said.append).finish(60)
    assert said[-1] == "WARNING: the rows of 4 intervals never reached the event store"
    assert len(said) == 2


def test_without_a_ring_nothing_is_written(tmp_path: Path) -> None:
    collect(Collector({0: tmp_path / "nothing.flight"}, print))
    with pytest.raises(StoreError):
        open_store(tmp_path / "run")


def test_the_last_state_of_a_rank_that_removed_its_log_is_stored(ranks: list[PlayedRank], tmp_path: Path) -> None:
    collector = collector_of(ranks)
    ranks[0].begin()
    collect(collector)
    for rank in ranks:
        rank.log.set_phase(Phase.DONE)
        rank.path.unlink()
    collect(collector)
    assert query(tmp_path, "SELECT DISTINCT json_extract_string(record, '$.phase') FROM states") == [("done",)]


def test_single_events_are_optional(tmp_path: Path) -> None:
    rank = PlayedRank(tmp_path, 0, tmp_path / "run" / "events", events_h=0.0)
    rank.compute(1, "F", 1.0, 2.0)
    rank.end_step(1)
    rank.end_step(2)
    collect(collector_of([rank]))
    assert query(tmp_path, "SELECT count(*) FROM events") == [(0,)]
    assert query(tmp_path, "SELECT count(*) FROM step_parts") == [(3,)]


def test_attempts_have_numbers_of_their_own(ranks: list[PlayedRank], tmp_path: Path) -> None:
    store = Location(str(tmp_path / "run" / "events"))
    assert begin_attempt(store, 0, new_run=True) == 0
    ranks[0].begin(0)
    collect(collector_of(ranks))
    assert begin_attempt(store, 0, new_run=False) == 1, "resumed by hand"
    assert begin_attempt(store, 7, new_run=False) == 7, "as the driver counts"
    (tmp_path / "run" / "events" / "steps" / "mine.txt").parent.mkdir(exist_ok=True)
    (tmp_path / "run" / "events" / "steps" / "mine.txt").touch()
    assert begin_attempt(store, 0, new_run=True) == 0
    assert [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()] == ["mine.txt"]


def test_ranks_are_known_before_their_steps(
    ranks: list[PlayedRank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader may list the store between two tables."""
    ranks[0].begin()
    ranks[0].end_step(1)
    monkeypatch.setattr(NodeStore, "write", lambda *a: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    collect(collector_of(ranks))
    assert query(tmp_path, "SELECT rank FROM ranks") == [(0,)]
