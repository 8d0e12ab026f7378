"""The ranks that an observer watches: those of its run's folder, and of no other run of its name."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.core import flight_record
from megascale.core.flight_files import flight_record_of_rank
from megascale.core.flight_record import FLIGHT_RECORD_VARIABLE
from megascale.core.rank import Rank
from megascale.fault import observed_ranks
from megascale.fault.messages import RankEnd
from megascale.fault.observed_ranks import ObservedRanks


@pytest.mark.parametrize(("folder", "watched"), [("a/run", (3,)), ("b/run", ()), ("a/run-b", ())])
def test_ranks_of_the_run_s_folder_are_watched(
    folder: str, watched: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_record, "SHARED_MEMORY", tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    path = tmp_path / f"megascale-{os.geteuid()}-{Path(folder).name}-1-00003.flight"
    with flight_record_of_rank(tmp_path / folder, Rank(3, 4, 3, "host"), {FLIGHT_RECORD_VARIABLE: str(path)}):
        ranks = ObservedRanks(tmp_path / "link" / "run", print)

        async def poll() -> None:
            ranks.poll()

        asyncio.run(poll())
        assert ranks.running == watched


def test_an_error_file_that_cannot_be_read_shows_a_fault_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_record, "SHARED_MEMORY", tmp_path)
    (tmp_path / "run" / "logs" / "rank-3.error.json").mkdir(parents=True)
    path = tmp_path / f"megascale-{os.geteuid()}-run-1-00003.flight"
    ends: list[RankEnd] = []
    ranks = ObservedRanks(tmp_path / "run", ends.append)
    with flight_record_of_rank(tmp_path / "run", Rank(3, 4, 3, "host"), {FLIGHT_RECORD_VARIABLE: str(path)}):

        async def see_the_end() -> None:
            ranks.poll()
            monkeypatch.setattr(observed_ranks, "process_exists", lambda pid: False)
            ranks.poll()

        asyncio.run(see_the_end())
    assert [(end.in_order, end.patterns) for end in ends] == [(False, ("status_unknown", "storage_error"))]


RANK = """
import sys
from pathlib import Path
from megascale.core.flight_files import flight_record_of_rank
from megascale.core.rank import Rank
with flight_record_of_rank(Path(sys.argv[1]), Rank(0, 1, 0, "host"), {}) as record:
    record.begin_step(int(sys.argv[2]))
    print(record.path, flush=True)
    if sys.stdin.readline() == "fail\\n":
        raise ValueError
"""


@pytest.mark.parametrize(("word", "step", "done"), [("end", 1, True), ("fail", 1, False), ("end", 0, False)])
def test_a_rank_that_removes_its_record_has_ended_in_order(word: str, step: int, done: bool, tmp_path: Path) -> None:
    """Between two polls it may be done and gone. Before the first step nothing tells that it was in order."""
    folder = tmp_path / f"run-{os.getpid()}"
    command = [sys.executable, "-c", RANK, str(folder), str(step)]
    rank = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert rank.stdin is not None and rank.stdout is not None
    path = Path(rank.stdout.readline().strip())
    ends: list[RankEnd] = []

    async def watch() -> None:
        ranks = ObservedRanks(folder, ends.append)
        ranks.poll()
        assert ranks.running == (0,)
        assert rank.stdin is not None
        rank.stdin.write(f"{word}\n")
        rank.stdin.close()
        rank.wait()
        ranks.poll()

    try:
        asyncio.run(watch())
        assert [(end.rank, end.in_order) for end in ends] == [(0, done)]
    finally:
        rank.kill()
        rank.wait()
        rank.stdout.close()
        path.unlink(missing_ok=True)
