"""A node's files: merged without losing or doubling a row, and bounded in bytes and age."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megascale.core.run_folder import TOKEN
from megascale.core.storage import Location
from megascale.operate.store import node_store
from megascale.operate.store.node_store import FAN_IN, NodeStore
from megascale.operate.store.query import fetch, open_store
from megascale.operate.store.settings import StoreSettings
from megascale.operate.store.table_files import TableFile, list_files, write_rows
from tests.operate.store.tables import rows


def opened(folder: Path, attempt: int = 0, said: list[str] | None = None, **settings: float) -> NodeStore:
    say = (said if said is not None else []).append
    return NodeStore(StoreSettings(str(folder / "events"), "node/1", **settings), attempt, say)  # type: ignore[arg-type]


def files(folder: Path, table: str) -> list[Path]:
    return sorted((folder / "events" / table).iterdir())


def steps(folder: Path, table: str = "steps") -> list[int]:
    return fetch(open_store(folder), f"SELECT step FROM {table} ORDER BY step")["step"].tolist()


def end_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_store, "GRACE_S", 0.0)


def test_small_files_are_merged_and_every_row_is_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_grace(monkeypatch)
    store = opened(tmp_path)
    for step in range(FAN_IN * FAN_IN + 3):
        store.prune()
        store.write("steps", rows("steps", step=step, tags=["gc", "evaluation"][step % 2]), step, step + 1)
        assert len(files(tmp_path, "steps")) <= 3 * FAN_IN
        if step % FAN_IN in (0, 1, FAN_IN - 1):  # around a merge
            assert steps(tmp_path) == list(range(step + 1))
    assert len(files(tmp_path, "steps")) == 1 + 3
    tags = fetch(open_store(tmp_path), "SELECT tags FROM steps ORDER BY step")["tags"].tolist()
    assert tags[:3] == ["gc", "evaluation", "gc"]


def test_nothing_is_written_where_the_run_is_lost(tmp_path: Path) -> None:
    """By a collector that begins while the run's folder is away, too."""
    store = opened(tmp_path / "run", in_run=True)
    with pytest.raises(FileNotFoundError, match="the run's folder is lost"):
        store.write("steps", rows("steps", step=1), 1, 2)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / TOKEN).touch()
    store.write("steps", rows("steps", step=1), 1, 2)
    assert steps(tmp_path / "run") == [1]


def test_covered_files_stay_for_readers_that_have_listed_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    for step in range(FAN_IN):
        store.write("steps", rows("steps", step=step), step, step + 1)
        store.replace("states", rows("states", time_ns=step))
        if step == 2:
            reader = open_store(tmp_path)
        store.prune()
    assert len(files(tmp_path, "steps")) == FAN_IN + 1
    assert fetch(reader, "SELECT step FROM steps ORDER BY step")["step"].tolist() == [0, 1, 2]
    assert fetch(reader, "SELECT time_ns FROM states")["time_ns"].tolist() == [2]
    assert fetch(open_store(tmp_path), "SELECT time_ns FROM states")["time_ns"].tolist() == [FAN_IN - 1]
    end_grace(monkeypatch)
    store.prune()
    assert [len(files(tmp_path, table)) for table in ("steps", "states")] == [1, 1]
    assert steps(tmp_path) == list(range(FAN_IN))


def test_covered_files_of_a_killed_collector_go_with_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(tmp_path)
    for time_ns in range(3):
        first.replace("states", rows("states", time_ns=time_ns))
    second = opened(tmp_path, 1)
    second.prune()
    assert len(files(tmp_path, "states")) == 3, "a reader may have listed them"
    end_grace(monkeypatch)
    second.prune()
    assert fetch(open_store(tmp_path), "SELECT time_ns FROM states")["time_ns"].tolist() == [2]
    assert len(files(tmp_path, "states")) == 1


def test_rows_of_a_merged_file_that_is_removed_do_not_come_back(tmp_path: Path) -> None:
    """Its parts are still there, for their time of grace."""
    store, at = opened(tmp_path, events_h=1.0), time.time_ns() // 1_000_000 - 2 * 3_600_000
    for step in range(FAN_IN + 1):
        store.write("events", rows("events", step=step), at + step, at + step + 1)
    store.prune()
    assert files(tmp_path, "events") == []


@pytest.mark.parametrize("what", ["removed", "damaged", "renamed column"])
def test_a_file_that_cannot_be_merged_stops_nothing(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has removed it, perhaps because a reader named it."""
    end_grace(monkeypatch)
    said: list[str] = []
    store = opened(tmp_path, said=said)
    for step in range(3 * FAN_IN):
        store.write("steps", rows("steps", step=step), step, step + 1)
        store.prune()
        if step == 3:
            file = files(tmp_path, "steps")[1]
            data = file.read_bytes()
            file.unlink()
            if what != "removed":
                file.write_bytes(data[:40] if what == "damaged" else data.replace(b"loss", b"gone"))
    assert len(said) == (what != "removed")
    assert all(str(file) in line for line in said)
    file.unlink(missing_ok=True)
    assert steps(tmp_path) == [step for step in range(3 * FAN_IN) if step != 1]
    assert len(files(tmp_path, "steps")) < FAN_IN + 3, "the others are merged"


def test_a_merge_that_fails_and_is_tried_again_doubles_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    store = opened(tmp_path)
    for step in range(FAN_IN):
        with monkeypatch.context() as patched:
            if step == FAN_IN - 1:
                patched.setattr(node_store, "write_table", fail)
                with pytest.raises(OSError, match="Input/output error"):
                    store.write("steps", rows("steps", step=step), step, step + 1)
        store.write("steps", rows("steps", step=step), step, step + 1)
    assert steps(tmp_path) == list(range(FAN_IN))


def test_large_files_are_not_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_store, "MAX_MERGED_BYTES", 100)
    store = opened(tmp_path)
    for step in range(3 * FAN_IN):
        store.write("steps", rows("steps", step=step), step, step + 1)
    assert len(files(tmp_path, "steps")) == 3 * FAN_IN


def test_a_table_that_is_replaced_has_one_file_in_each_attempt(tmp_path: Path) -> None:
    for attempt in range(2):
        store = opened(tmp_path, attempt)
        for time_ns in range(3):
            store.replace("states", rows("states", attempt=attempt, time_ns=time_ns))
    found = fetch(open_store(tmp_path), "SELECT attempt, time_ns FROM states ORDER BY attempt")
    assert (found["attempt"].tolist(), found["time_ns"].tolist()) == ([0, 1], [2, 2])
    store.discard("states")
    assert fetch(open_store(tmp_path), "SELECT attempt FROM states")["attempt"].tolist() == [0]


def test_single_events_go_first_and_the_oldest_before_others(tmp_path: Path) -> None:
    """The files of this node's earlier attempts count, and those of other nodes do not."""
    other = TableFile("events", "node-2", 0, 0, 1)
    write_rows(Location(str(tmp_path / "events")), other, rows("events"))
    first = opened(tmp_path, 0)
    for step in range(4):
        first.write("events", rows("events", step=step), step, step + 1)
        first.write("step_parts", rows("step_parts", step=step), step, step + 1)
    event_bytes = files(tmp_path, "events")[-1].stat().st_size
    part_bytes = files(tmp_path, "step_parts")[-1].stat().st_size
    second = opened(tmp_path, 1, max_bytes=2 * event_bytes + 4 * part_bytes, events_h=1e9)
    second.prune()
    assert len(files(tmp_path, "events")) == 3 and other.path.endswith(files(tmp_path, "events")[0].name)
    assert sorted({2, 3}) == [step for step in steps(tmp_path, "events") if step]
    opened(tmp_path, 1, max_bytes=2 * part_bytes).prune()
    assert [file.node for file in list_files(Location(str(tmp_path / "events")), "events")] == ["node-2"]
    assert steps(tmp_path, "step_parts") == [2, 3]


def test_single_events_are_kept_for_some_hours(tmp_path: Path) -> None:
    store, now = opened(tmp_path, events_h=1.0), time.time_ns() // 1_000_000
    for minutes in (90, 61, 30):
        at = now - minutes * 60_000
        for table in ("events", "step_parts"):
            store.write(table, rows(table, step=minutes), at - 1, at)
    store.prune()
    assert steps(tmp_path, "events") == [30] and steps(tmp_path, "step_parts") == [30, 61, 90]
