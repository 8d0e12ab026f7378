"""A node's files: merged without losing or doubling a row, and bounded in bytes and age."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megascale.core.storage import Location
from megascale.eventstore import node_store
from megascale.eventstore.node_store import FAN_IN, NodeStore
from megascale.eventstore.query import fetch, open_store
from megascale.eventstore.settings import StoreSettings
from megascale.eventstore.table_files import TableFile, list_files, write_rows
from tests.eventstore.tables import rows


def opened(folder: Path, attempt: int = 0, **settings: float) -> NodeStore:
    return NodeStore(StoreSettings(str(folder / "events"), "node/1", **settings), attempt)  # type: ignore[arg-type]


def files(folder: Path, table: str) -> list[Path]:
    return sorted((folder / "events" / table).iterdir())


def steps(folder: Path, table: str = "steps") -> list[int]:
    return fetch(open_store(folder), f"SELECT step FROM {table} ORDER BY step")["step"].tolist()


def test_small_files_are_merged_and_every_row_is_there_once(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for step in range(FAN_IN * FAN_IN + 3):
        store.write("steps", rows("steps", step=step, tags=["gc", "evaluation"][step % 2]), step, step + 1)
        assert steps(tmp_path) == list(range(step + 1))
        assert len(files(tmp_path, "steps")) <= 3 * FAN_IN
    assert len(files(tmp_path, "steps")) == 1 + 3
    tags = fetch(open_store(tmp_path), "SELECT tags FROM steps ORDER BY step")["tags"].tolist()
    assert tags[:3] == ["gc", "evaluation", "gc"]


def test_merged_files_stay_until_the_next_write(tmp_path: Path) -> None:
    """A reader that has listed them may open them yet."""
    store = opened(tmp_path)
    for step in range(FAN_IN):
        store.write("steps", rows("steps", step=step), step, step + 1)
    assert len(files(tmp_path, "steps")) == FAN_IN + 1
    store.write("steps", rows("steps", step=FAN_IN), FAN_IN, FAN_IN + 1)
    assert len(files(tmp_path, "steps")) == 2


def test_a_merge_that_fails_and_is_tried_again_doubles_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Location) -> bytes:
        raise OSError(5, "Input/output error")

    store = opened(tmp_path)
    for step in range(FAN_IN):
        with monkeypatch.context() as patched:
            if step == FAN_IN - 1:
                patched.setattr(Location, "read", fail)
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
