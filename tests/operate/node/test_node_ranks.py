"""Ranks on a node: files that do not answer or have no space, a run's folder that is lost, and records left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lab.small_disk import fill_disk, small_disk
from megascale.core.network import LOOPBACK
from megascale.core.run_folder import read_token, write_token
from megascale.operate.channel.messages import RankEnd, Start
from megascale.operate.driver.classify import classify_ends
from megascale.operate.node import node_ranks, rank_ends
from megascale.operate.node.node_ranks import NodeRanks, remove_lost_records
from megascale.operate.node.rank_ends import describe_end
from megascale.operate.node.ranks import NodePlace
from megascale.record.log_files import log_path
from tests.core.test_run_folder import known
from tests.marks import needs_mount

BEGIN = """
import sys
from pathlib import Path
from megascale.record.log import LogIdentity, open_log
open_log(LogIdentity(sys.argv[1], 0, 1, 0), Path(sys.argv[2]))
print(flush=True)
sys.stdin.read()
"""


def start_rank(run: str, path: Path) -> subprocess.Popen[bytes]:
    """Start a process with a flight record, which lives until its stdin ends."""
    command = [sys.executable, "-c", BEGIN, run, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


ORDER = Start(1, "run", 2, (0, 1), "127.0.0.1:1", ("--version",), "", {})


def ranks_of(folder: Path, ends: list[RankEnd]) -> NodeRanks:
    """The ranks of an attempt, each of which prints a version and ends."""
    order = replace(ORDER, logs=str(folder / "logs"))
    no_secret = sys.__stdin__.fileno()  # they read none
    return NodeRanks(order, NodePlace(f"n{os.getpid()}", LOOPBACK, "", 1), no_secret, ends.append)


def test_a_file_system_that_does_not_answer_delays_only_the_end_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nobody writes stands for the error file of rank 0."""
    monkeypatch.setattr(node_ranks, "FILES_S", 0.2)
    ends: list[RankEnd] = []

    async def body() -> None:
        ranks = ranks_of(tmp_path, ends)
        await ranks.start(None, [])
        os.mkfifo(tmp_path / "logs" / "rank-0.error.json")
        while len(ends) < 2:
            await asyncio.sleep(0.01)
        assert await ranks.stop(0) == ()

    asyncio.run(asyncio.wait_for(body(), 60))
    os.close(os.open(tmp_path / "logs" / "rank-0.error.json", os.O_RDWR))  # its reader is freed
    found = {end.rank: end for end in ends}
    assert found[0].last_lines == ("how rank 0 ended cannot be read: no answer within 0.2 s",)
    assert classify_ends({0: found[0]}, {0: "n0"}).class_ == "storage"
    assert (found[1].status, found[1].patterns) == (0, ())
    assert found[1].last_lines[0].startswith("megascale ")


def test_ranks_are_not_started_when_the_folder_of_logs_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_ranks, "FILES_S", 0.05)
    answer = threading.Event()
    monkeypatch.setattr(node_ranks, "prepare_logs", lambda order, node, restore: answer.wait(30))
    ends: list[RankEnd] = []
    asyncio.run(ranks_of(tmp_path, ends).start(None, []))
    answer.set()
    assert [end.rank for end in ends] == [0, 1]
    finding = classify_ends({end.rank: end for end in ends}, {0: "n0", 1: "n0"})
    assert finding.class_ == "storage"
    assert "the folder of logs cannot be used: no answer within 0.05 s" in finding.what


@pytest.mark.parametrize("fails", [False, True])
def test_no_rank_starts_after_a_stop(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal ends the agent while the folder of logs is made. If that fails, no rank of the attempt has ended."""
    begun, answer = threading.Event(), threading.Event()

    def prepare(order: Start, node: str, *, restore: bool) -> None:
        begun.set()
        answer.wait(30)
        if fails:
            raise OSError(errno.EIO, "Input/output error")
        rank_ends.prepare_logs(order, node, restore=restore)

    monkeypatch.setattr(node_ranks, "prepare_logs", prepare)

    async def body() -> None:
        ranks = ranks_of(tmp_path, ends := [])
        starting = asyncio.ensure_future(ranks.start(None, []))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        await ranks.stop(0)
        answer.set()
        await starting
        assert not ranks.running and not ends

    asyncio.run(asyncio.wait_for(body(), 60))


def test_records_of_ended_ranks_are_removed_and_those_of_running_ranks_and_other_runs_stay() -> None:
    run = f"test-lost-records-{os.getpid()}"
    paths = [log_path(name, 1, 0) for name in (f"{run}@node0", f"{run}@node1", f"{run}2@node0")]
    ended, running, other = [start_rank(run, path) for path in paths]
    try:
        for process in (ended, other):
            process.communicate()
        remove_lost_records(run)
        assert [path.exists() for path in paths] == [False, True, True]
    finally:
        running.communicate()
        for path in paths:
            path.unlink(missing_ok=True)


def mkdir(folder: Path) -> Path:
    """Make a folder, and return it."""
    folder.mkdir()
    return folder


async def until_ended(ranks: NodeRanks, ends: list[RankEnd]) -> None:
    """Start the ranks, and wait for their ends."""
    await ranks.start(None, [])
    while len(ends) < 2:
        await asyncio.sleep(0.01)


def ranks_in(run: Path, ends: list[RankEnd], wait_s: float) -> NodeRanks:
    """The ranks of an attempt that must find the folder of a run."""
    order = replace(ORDER, logs=str(run / "logs" / "attempt-1"), folder=known(run, wait_s=wait_s))
    return NodeRanks(order, NodePlace(f"n{os.getpid()}", LOOPBACK, "", 1), sys.__stdin__.fileno(), ends.append)


@pytest.mark.parametrize("place", ["gone", "empty"])
def test_no_rank_starts_in_a_lost_folder_and_nothing_is_made_there(place: str, tmp_path: Path) -> None:
    run, ends = tmp_path / "run", list[RankEnd]()
    if place == "empty":
        run.mkdir()
    asyncio.run(asyncio.wait_for(ranks_in(run, ends, 0.0).start(None, []), 60))
    finding = classify_ends({end.rank: end for end in ends}, {0: "n0", 1: "n0"})
    assert finding.class_ == "storage" and f"the run's folder {run} is lost" in finding.what
    assert not run.exists() or not list(run.iterdir())


def test_copies_in_memory_serve_in_a_lost_folder(tmp_path: Path) -> None:
    run, ends = tmp_path / "run", list[RankEnd]()
    copies = known(run).copies(f"n{os.getpid()}")
    copies.mkdir(parents=True)
    (copies / "rank-00000.a.json").touch()
    asyncio.run(asyncio.wait_for(until_ended(ranks_in(run, ends, 0.0), ends), 60))
    assert [end.status for end in ends] == [0, 0] and read_token(run, {}) == ("id", ["first"])


@pytest.mark.parametrize("trouble", ["lost", "full"])
def test_ranks_start_once_the_folder_is_back_and_has_space(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ends, looks = tmp_path / "run", list[RankEnd](), list[Path]()
    if trouble == "full":
        write_token(mkdir(run), "id", "first")

    def check_space(logs: Path) -> None:
        looks.append(logs)
        if trouble == "full" and len(looks) < 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(logs))

    async def pause(seconds: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        if trouble == "lost" and not run.exists():
            write_token(mkdir(run), "id", "first")
        await sleep(min(seconds, 0.01))

    monkeypatch.setattr(rank_ends, "check_space", check_space)
    monkeypatch.setattr(asyncio, "sleep", pause)
    asyncio.run(asyncio.wait_for(until_ended(ranks_in(run, ends, 1000.0), ends), 60))
    assert [end.status for end in ends] == [0, 0] and len(looks) == (3 if trouble == "full" else 1)


@needs_mount
def test_an_end_without_a_word_on_a_full_file_system_is_of_storage(tmp_path: Path) -> None:
    with small_disk(tmp_path / "logs", 1 << 20):
        log = tmp_path / "logs" / "rank-0.log"
        log.touch()
        before = describe_end(0, 4, 1.0, log.with_suffix(".error.json"), log)
        fill_disk(tmp_path / "logs")
        end = describe_end(0, 4, 1.0, log.with_suffix(".error.json"), log)
    assert classify_ends({0: before}, {0: "n0"}).class_ == "process"
    finding = classify_ends({0: end}, {0: "n0"})
    assert finding.class_ == "storage"
    assert finding.evidence[-1] == f"how rank 0 ended cannot be read: {tmp_path}/logs: No space left on device"
