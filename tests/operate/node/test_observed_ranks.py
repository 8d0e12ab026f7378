"""The ranks that an observer watches: those of its run's folder, and of no other run of its name."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.core.rank import Rank
from megascale.operate.channel.messages import RankEnd
from megascale.operate.node.observed_ranks import ObservedRanks
from megascale.record import log_files
from megascale.record.log_files import FLIGHT_RECORD_VARIABLE, log_of_rank


@pytest.mark.parametrize(("folder", "watched"), [("a/run", (3,)), ("b/run", ()), ("a/run-b", ())])
def test_ranks_of_the_run_s_folder_are_watched(
    folder: str, watched: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "SHARED_MEMORY", tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    path = tmp_path / f"megascale-{os.geteuid()}-{Path(folder).name}-1-00003.flight"
    with log_of_rank(tmp_path / folder, Rank(3, 4, 3, "host"), {FLIGHT_RECORD_VARIABLE: str(path)}):
        ranks = ObservedRanks(tmp_path / "link" / "run", print)

        async def poll() -> None:
            ranks.poll()

        asyncio.run(poll())
        assert ranks.running == watched


@pytest.mark.parametrize("damage", [b"\0", b"\xff", b"\x5a"])
def test_a_rank_whose_log_is_damaged_is_still_watched(
    damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "SHARED_MEMORY", tmp_path)
    path = tmp_path / f"megascale-{os.geteuid()}-run-1-00000.flight"
    ends: list[RankEnd] = []

    async def watch() -> None:
        ranks = ObservedRanks(tmp_path / "run", ends.append)
        with log_of_rank(tmp_path / "run", Rank(0, 1, 0, "host"), {FLIGHT_RECORD_VARIABLE: str(path)}) as log:
            log.begin_step(7)
            ranks.poll()
            size = path.stat().st_size
            with path.open("r+b") as file:
                file.write(damage * size)
            ranks.poll()
            assert ranks.running == (0,) and not ends

    asyncio.run(watch())


RANK = """
import os, sys
from pathlib import Path
from megascale.record.log_files import log_of_rank
from megascale.record.layout import Phase
from megascale.core.rank import Rank
from megascale.operate.node.failure import write_error
rank = Rank(3, 4, 0, "host")
with log_of_rank(Path(sys.argv[1]), rank, {}) as record:
    record.begin_step(7)
    print(record.path, flush=True)
    word = sys.stdin.readline().strip()
    if word == "fail":
        write_error(ValueError("a bad value"), rank)
        os._exit(1)
    if word.isdecimal():
        record.end(int(word))
        record.set_phase(Phase.DONE)
sys.exit(int(word) if word.isdecimal() else 0)
"""
ERROR_FILES = {"TORCHELASTIC_ERROR_FILE": "error.json", "MEGASCALE_ERROR_FILE": "rank-%t.error.json"}
SIGKILL, UNKNOWN = -9, None


def observe_end(folder: Path, word: str, *, reaped: bool, **env: str) -> RankEnd:
    """Have a rank end with a record of its own, and return what an observer knows of it. `reaped`: its parent has
    waited for it before.
    """
    run = folder / f"run-{os.getpid()}"
    command = [sys.executable, "-c", RANK, str(run)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    rank = subprocess.Popen(command, env=os.environ | env, stderr=subprocess.DEVNULL, text=True, **pipes)
    assert rank.stdin is not None and rank.stdout is not None
    path = Path(rank.stdout.readline().strip())
    ends: list[RankEnd] = []

    async def watch() -> None:
        ranks = ObservedRanks(run, ends.append)
        ranks.poll()
        assert ranks.running == (3,)
        if word == "kill":
            rank.kill()
        else:
            rank.communicate(f"{word}\n") if reaped else print(word, file=rank.stdin, flush=True)
        rank.wait() if reaped else os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        ranks.poll()
        ranks.close()

    try:
        asyncio.run(watch())
    finally:
        rank.kill()
        rank.wait()
        rank.stdin.close()
        rank.stdout.close()
        path.unlink(missing_ok=True)
    (end,) = ends
    return end


@pytest.mark.parametrize(
    ("word", "reaped", "status", "in_order"),
    [
        ("0", False, 0, True),
        ("0", True, 0, True),
        ("143", True, 143, True),
        ("kill", False, SIGKILL, False),
        ("kill", True, UNKNOWN, False),
        ("vanish", False, 0, False),
        ("vanish", True, UNKNOWN, False),
    ],
)
def test_the_status_of_a_rank_is_what_it_said_or_the_kernel_knows_and_else_unknown(
    word: str, reaped: bool, status: int | None, in_order: bool, tmp_path: Path
) -> None:
    """A rank removes its record as it ends, in order or not: nothing follows from that."""
    end = observe_end(tmp_path, word, reaped=reaped)
    assert (end.rank, end.status, end.in_order, end.error, end.step) == (3, status, in_order, None, 7)


@pytest.mark.parametrize("variable", ERROR_FILES)
@pytest.mark.parametrize("reaped", [False, True])
def test_the_error_of_a_rank_is_read_where_its_launcher_has_it_written(
    variable: str, reaped: bool, tmp_path: Path
) -> None:
    end = observe_end(tmp_path, "fail", reaped=reaped, **{variable: str(tmp_path / ERROR_FILES[variable])})
    assert (end.status, end.error, end.error_kind) == (1, "ValueError: a bad value", "ValueError")


def test_an_error_of_an_earlier_start_is_not_this_one_s(tmp_path: Path) -> None:
    file = {"MEGASCALE_ERROR_FILE": str(tmp_path / "error.json")}
    assert observe_end(tmp_path, "fail", reaped=True, **file).error
    assert observe_end(tmp_path, "kill", reaped=False, **file).error is None


def test_an_error_file_that_cannot_be_read_shows_a_fault_of_storage(tmp_path: Path) -> None:
    end = observe_end(tmp_path, "kill", reaped=False, MEGASCALE_ERROR_FILE=str(tmp_path))
    assert (end.status, end.in_order, end.patterns) == (SIGKILL, False, ("storage_error",))
