"""Ranks on a node: files that do not answer, and flight records that a lost node has left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megascale.core.flight_record import flight_record_path
from megascale.fault import node_ranks
from megascale.fault.classify import classify_ends
from megascale.fault.messages import RankEnd, Start
from megascale.fault.node_ranks import NodeRanks, remove_lost_records

BEGIN = """
import sys
from pathlib import Path
from megascale.core.flight_writer import FlightIdentity, open_flight_record
open_flight_record(FlightIdentity(sys.argv[1], 0, 1, 0), Path(sys.argv[2]))
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


def ranks_of(folder: Path, ends: list[RankEnd]) -> NodeRanks:
    """The ranks of an attempt, each of which prints a version and ends."""
    order = Start(1, "run", 2, (0, 1), "127.0.0.1:1", ("--version",), str(folder / "logs"), {})
    no_secret = sys.__stdin__.fileno()  # they read none
    return NodeRanks(order, f"n{os.getpid()}", no_secret, ends.append)


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
    monkeypatch.setattr(NodeRanks, "_prepare_logs", lambda self, restore: answer.wait(30))
    ends: list[RankEnd] = []
    asyncio.run(ranks_of(tmp_path, ends).start(None, []))
    answer.set()
    assert [end.rank for end in ends] == [0, 1]
    finding = classify_ends({end.rank: end for end in ends}, {0: "n0", 1: "n0"})
    assert finding.class_ == "storage"
    assert "the folder of logs cannot be used: no answer within 0.05 s" in finding.what


def test_no_rank_starts_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal ends the agent while the folder of logs is made."""
    begun, answer = threading.Event(), threading.Event()

    def prepare(ranks: NodeRanks, *, restore: bool) -> None:
        begun.set()
        answer.wait(30)
        prepare_logs(ranks, restore=restore)

    prepare_logs = NodeRanks._prepare_logs
    monkeypatch.setattr(NodeRanks, "_prepare_logs", prepare)

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
    paths = [flight_record_path(name, 1, 0) for name in (f"{run}@node0", f"{run}@node1", f"{run}2@node0")]
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
