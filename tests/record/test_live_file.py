"""The live file: what is written is read, in few bytes; other content is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megascale.record import live_file
from megascale.record.live_file import LIVE_FILE, LiveFile, LiveState, read_live_file
from megascale.record.rank_state import RankStatus

RANKS = (
    RankStatus(0, 0),
    RankStatus(1, 0, "step", 41, idle_s=3, state="T"),
    RankStatus(2, 0, "data", 42),
    RankStatus(3, 0, "done", 42),
)


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / LIVE_FILE
    assert read_live_file(path) is None
    state = LiveState(1700000000.5, 3, RANKS, "run", 143, source="live file")
    assert LiveFile(path).write(state) == live_file.EVERY_S
    assert read_live_file(path) == state
    assert [entry.name for entry in tmp_path.iterdir()] == [LIVE_FILE]


def test_a_healthy_job_of_12288_ranks_takes_a_kilobyte_and_a_mixed_one_is_written_less_often(tmp_path: Path) -> None:
    path = tmp_path / LIVE_FILE
    LiveFile(path).write(LiveState(0.0, 0, [RankStatus(rank, 9, "step", 7, state="S") for rank in range(12288)]))
    assert path.stat().st_size < 1024
    mixed = [RankStatus(rank, 0, ("step", "data")[rank % 2], rank, idle_s=rank, silent_s=rank) for rank in range(12288)]
    pause_s = LiveFile(path).write(LiveState(0.0, 0, mixed))
    assert pause_s == pytest.approx(path.stat().st_size / live_file.MOST_BYTES_PER_S, rel=0.01)
    assert read_live_file(path).ranks == tuple(mixed)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 2),
        ("time", "now"),
        ("status", "0"),
        ("stage", 3),
        ("step", [["5", 4]]),
        ("phase", [["step", -1]]),
        ("phase", [["step", 1 << 40]]),
        ("phase", 7),
        ("ranks", None),
    ],
)
def test_other_content_is_refused_with_the_file_s_name(key: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / LIVE_FILE
    LiveFile(path).write(LiveState(0.0, 0, RANKS))
    data = json.loads(path.read_text())
    if key in data:
        path.write_text(json.dumps(data | {key: value}))
    else:
        path.write_text("[1]")
    with pytest.raises(ValueError, match="not a live file"):
        read_live_file(path)


def test_a_file_of_any_size_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_file, "MOST_BYTES", 100)
    (tmp_path / LIVE_FILE).write_text(" " * 101)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        read_live_file(tmp_path / LIVE_FILE)
