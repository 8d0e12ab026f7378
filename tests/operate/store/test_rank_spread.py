"""The spread over ranks in TensorBoard: from the rows of all nodes, each step once, without steps that are tagged."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from megascale.core.storage import Location
from megascale.operate.store import rank_spread, reading
from megascale.operate.store.collector import Collector
from megascale.operate.store.rank_spread import FOLDER, RankSpread
from megascale.operate.store.settings import StoreSettings
from megascale.operate.store.table_files import TableFile, write_rows
from tests.operate.store.played_ranks import PlayedRank
from tests.operate.store.tables import rows
from tests.record.test_metrics_writers import scalars


def write(folder: Path, rank: int, steps: list[int], seconds: float, tags: str = "", at_s: float = 0.0) -> None:
    """Write steps of a rank on its own node, in which its compute takes so long, and half a second more waits. Every
    second step has a pause of 2 s. `at_s`: when they end, in seconds since 1970.
    """
    at_ms = round(1000 * at_s)
    store, span = Location(str(folder / "events")), (at_ms + steps[0] * 10, at_ms + steps[-1] * 10 + 10)
    pauses = [step for step in steps if step % 2 == 0]
    total = [round((seconds + 0.5) * 1e9), round(1e9), round(3e9)]
    parts = rows(
        "step_parts", 3 * len(steps) + len(pauses), rank=rank, step=[step for step in steps for _ in range(3)] + pauses,
        axis=["compute", "tp", "step"] * len(steps) + ["host"] * len(pauses),
        name=["F", "all_gather", "step"] * len(steps) + ["gc"] * len(pauses),
        total_ns=total * len(steps) + [2 * 10**9] * len(pauses),
        exposed_ns=[500_000_000, 250_000_000, 0] * len(steps) + [2 * 10**9] * len(pauses),
    )  # fmt: skip
    write_rows(store, TableFile("step_parts", f"node-{rank}", 0, *span), parts)
    tagged = rows("steps", len(steps), rank=rank, step=steps, tags=tags, end_ns=at_ms * 10**6)
    write_rows(store, TableFile("steps", f"node-{rank}", 0, *span), tagged)


def spread_of(folder: Path) -> RankSpread:
    return RankSpread(StoreSettings(str(folder / "events"), "node-0", tensorboard=str(folder / "board")), 0)


def points(folder: Path) -> dict[str, dict[int, float]]:
    return {tag: dict(values) for tag, values in scalars(folder / "board" / FOLDER).items()}


def test_points_have_least_median_and_largest_of_the_ranks(tmp_path: Path) -> None:
    for rank, seconds in enumerate((1.0, 2.0, 4.0)):
        write(tmp_path, rank, [1], seconds * 7, tags="first step")
        write(tmp_path, rank, [2, 3], seconds)
        write(tmp_path, rank, [4], seconds * 7)
    spread = spread_of(tmp_path)
    spread.write()
    assert points(tmp_path) == {
        "compute F/min": {3: 1.0}, "compute F/median": {3: 2.0}, "compute F/max": {3: 4.0},
        "exposed tp all_gather/min": {3: 0.25}, "exposed tp all_gather/median": {3: 0.25},
        "exposed tp all_gather/max": {3: 0.25}, "step/min": {3: 3.0}, "step/median": {3: 3.0}, "step/max": {3: 3.0},
        "host gc/min": {3: 1.0}, "host gc/median": {3: 1.0}, "host gc/max": {3: 1.0},
    }  # fmt: skip
    spread.write()
    write(tmp_path, 0, [5], 8.0)
    spread.write_if_due(last=True)
    write(tmp_path, 0, [6], 9.0)
    spread.write_if_due(last=True)
    assert points(tmp_path)["compute F/max"] == {3: 4.0, 4: 28.0}, "each step once, and one last point"


def test_points_that_are_minutes_apart_have_all_steps_between_them(tmp_path: Path) -> None:
    now = time.time()
    write(tmp_path, 0, [2, 3], 1.0, at_s=now - 900)
    write(tmp_path, 0, [4], 8.0, at_s=now - 900)
    spread = spread_of(tmp_path)
    spread.write()
    write(tmp_path, 0, [5, 6], 8.0, at_s=now - 450)
    write(tmp_path, 0, [7, 8], 2.0, at_s=now)
    spread.write()
    assert points(tmp_path)["compute F/max"] == {3: 1.0, 7: (3 * 8.0 + 2.0) / 4}


def test_only_what_was_stored_since_the_last_point_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, read, seconds = time.time(), rank_spread.read_store, list[float]()

    def record(*arguments: Any, last_s: float, **options: Any) -> Any:
        seconds.append(last_s)
        return read(*arguments, last_s=last_s, **options)

    monkeypatch.setattr(rank_spread, "read_store", record)
    spread = spread_of(tmp_path)
    for steps, at_s in (([2, 3], now - 100), ([4, 5], now)):
        write(tmp_path, 0, steps, 1.0, at_s=at_s)
        spread.write()
        write(tmp_path, 0, [steps[-1] + 10], 1.0, at_s=at_s)
    interval_s = StoreSettings.interval_s
    assert seconds == [pytest.approx(2 * interval_s, abs=5), pytest.approx(100 + interval_s, abs=5)]


def test_damaged_files_are_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the rings would fill up: the collector writes the points in the thread that drains them."""
    write(tmp_path, 0, [2, 3], 1.0)
    for file in (tmp_path / "events" / "steps").iterdir():
        file.write_bytes(b"damaged")
    monkeypatch.setattr(reading, "damaged_files", lambda *_: pytest.fail("all files are read"))
    with pytest.raises(OSError, match="cannot be read"):
        spread_of(tmp_path).write()


def test_nothing_is_written_before_it_is_due(tmp_path: Path) -> None:
    write(tmp_path, 0, [2, 3], 1.0)
    spread_of(tmp_path).write_if_due()
    assert not (tmp_path / "board").exists()


def test_a_store_that_takes_long_to_read_delays_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 0, [2, 3], 1.0)
    spread = spread_of(tmp_path)
    spread.write()
    write(tmp_path, 0, [4], 1.0)
    monkeypatch.setattr(rank_spread, "LAST_S", 0.0)
    spread.write_if_due(last=True)
    assert points(tmp_path)["step/max"] == {2: 3.0}


def test_a_store_that_cannot_be_read_is_an_error_of_storage(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no such folder"):
        spread_of(tmp_path / "nothing").write()


def test_a_file_that_is_merged_meanwhile_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 0, [2, 3], 1.0)
    write(tmp_path, 0, [4], 1.0)
    opened = reading.open_store

    def open_and_merge(*arguments: object, **options: object) -> object:
        store = opened(*arguments, **options)  # type: ignore[arg-type]
        parts = sorted((tmp_path / "events" / "step_parts").iterdir())
        write(tmp_path, 0, [2, 3, 4], 1.0)
        for file in parts:
            file.unlink()
        monkeypatch.setattr(reading, "open_store", opened)
        return store

    monkeypatch.setattr(reading, "open_store", open_and_merge)
    spread_of(tmp_path).write()
    assert points(tmp_path)["compute F/max"] == {3: 1.0}


def test_the_collector_of_rank_0_writes_points_and_says_once_if_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_spread, "EVERY_S", 0.0)
    monkeypatch.setattr(rank_spread, "MAX_SHARE", 1e9)
    board, said = tmp_path / "board", list[str]()
    board.write_text("in the way")
    ranks = [PlayedRank(tmp_path, rank, tmp_path / "run/events", tensorboard=str(board)) for rank in range(2)]
    collector = Collector({rank.rank: rank.path for rank in ranks}, said.append)
    for step in range(1, 5):
        for rank in ranks:
            rank.compute(step, "F", 1.0, 2.0 + rank.rank)
            rank.end_step(step)
        if step == 3:
            assert [line.partition(":")[0] for line in said] == ["WARNING"]
            board.unlink()
        collector.poll()
        collector.write()
    assert len(said) == 1
    assert "TensorBoard misses how ranks differ" in said[0]
    assert points(tmp_path)["compute F/max"] == {2: 2.0, 3: 2.0}
