"""The root cause of several failures."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import DataError, Exit
from megascale.core.rank import Rank
from megascale.launch import flight
from megascale.launch.failure import ERROR_FILE, is_peer_lost, main, root_cause, write_error
from tests.launch.dumps import Recorder


def leave(logs: Path, rank: int, **record: Any) -> None:
    full = {
        "time": 1.0,
        "rank": rank,
        "host": "h",
        "what": f"error of {rank}",
        "exit_status": 1,
        "peer_was_lost": False,
    }
    (logs / f"rank-{rank}.error.json").write_text(json.dumps(full | record))


def test_the_first_own_error_wins(tmp_path: Path) -> None:
    leave(tmp_path, 0, time=1.0, peer_was_lost=True)
    leave(tmp_path, 1, time=3.0)
    leave(tmp_path, 2, time=2.0, exit_status=3)
    cause = root_cause(tmp_path, {}, {0: 1, 1: 1, 2: 3})
    assert (cause.rank, cause.message, cause.exit_status) == (2, "error of 2", 3)


def test_a_killed_rank_before_those_that_lost_it(tmp_path: Path) -> None:
    leave(tmp_path, 0, peer_was_lost=True)
    cause = root_cause(tmp_path, {3: signal.SIGABRT}, {0: 1, 3: -6})
    assert (cause.rank, cause.message, cause.unexplained) == (3, "killed by SIGABRT", True)


def test_a_silent_exit_before_those_that_lost_it(tmp_path: Path) -> None:
    leave(tmp_path, 0, peer_was_lost=True)
    cause = root_cause(tmp_path, {}, {0: 1, 1: 7})
    assert (cause.rank, cause.exit_status, cause.unexplained) == (1, 7, True)


def test_only_lost_peers(tmp_path: Path) -> None:
    leave(tmp_path, 1, time=2.0, peer_was_lost=True)
    leave(tmp_path, 0, time=1.0, peer_was_lost=True)
    assert root_cause(tmp_path, {}, {0: 1, 1: 1}).rank == 0


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:7342. This is typically caused by"), True),
        (RuntimeError("remote process exited: group rank 1, pid 7"), True),
        (
            RuntimeError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE"),
            True,
        ),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("connection closed by peer"), False),
        (DataError("the socket corpus is empty"), False),
    ],
)
def test_errors_of_a_lost_peer(error: Exception, lost: bool) -> None:
    assert is_peer_lost(error) is lost


def test_an_error_is_written_with_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "rank-2.error.json"))
    write_error(DataError("no text", hint="--key NAME"), Rank(2, 4, 2, "node7"))
    cause = root_cause(tmp_path, {}, {2: 3})
    assert (cause.rank, cause.host, cause.exit_status) == (2, "node7", Exit.DATA)
    assert cause.message == "no text  -> --key NAME"


def three_wait_for_the_third(folder: Path) -> None:
    for rank in (0, 1, 2):
        recorder = Recorder(rank, "node7", dp=[0, 1, 2, 3])
        recorder.collective("dp", done=False)
        recorder.write(folder)


ABORTED = dict.fromkeys((0, 1, 2), signal.SIGABRT)
CODES = dict.fromkeys((0, 1, 2), -6) | {3: -9}


def test_a_stuck_rank_before_those_whose_watchdogs_ended_them(tmp_path: Path) -> None:
    three_wait_for_the_third(tmp_path)
    cause = root_cause(tmp_path, ABORTED, CODES, tmp_path)
    assert (cause.rank, cause.unexplained) == (3, True)
    assert cause.message.startswith("never joined all_reduce 1 of group dp, in which ranks 0, 1, 2 wait since ")
    Recorder(3, "node8", dp=[0, 1, 2, 3]).write(tmp_path)
    assert root_cause(tmp_path, ABORTED, CODES, tmp_path).host == "node8"


def test_without_dumps_the_first_that_aborted(tmp_path: Path) -> None:
    cause = root_cause(tmp_path, ABORTED, CODES, tmp_path)
    assert (cause.rank, cause.message) == (0, "killed by SIGABRT")


def test_an_abort_of_its_own_is_both(tmp_path: Path) -> None:
    """The watchdogs of the other ranks may have had time to dump."""
    three_wait_for_the_third(tmp_path)
    cause = root_cause(tmp_path, {1: signal.SIGABRT, 3: signal.SIGABRT}, CODES, tmp_path)
    assert cause.rank == 3 and cause.message.startswith("killed by SIGABRT; never joined all_reduce 1 of group dp")


def test_a_report_is_not_lost_to_a_bad_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(folder: Path) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(flight, "find_suspect", broken)
    cause = root_cause(tmp_path, ABORTED, CODES, tmp_path)
    assert (cause.rank, cause.message) == (0, "killed by SIGABRT")
    main(str(tmp_path), "134", str(tmp_path))
    out, err = capsys.readouterr()
    assert out == "134\n"
    assert err == f"megascale: the flight records in {tmp_path} cannot be analysed: RecursionError('too deep')\n" * 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_another_signal_before_what_the_watchdogs_say(number: int, tmp_path: Path) -> None:
    three_wait_for_the_third(tmp_path)
    cause = root_cause(tmp_path, {0: signal.SIGABRT, 2: number}, CODES, tmp_path)
    assert (cause.rank, cause.message) == (2, f"killed by {signal.Signals(number).name}")


def test_a_rank_s_own_error_before_what_the_watchdogs_say(tmp_path: Path) -> None:
    three_wait_for_the_third(tmp_path)
    leave(tmp_path, 2)
    assert root_cause(tmp_path, ABORTED, CODES, tmp_path).message == "error of 2"


def test_the_report_for_slurm_names_the_stuck_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(str(tmp_path), "134", str(tmp_path))
    assert capsys.readouterr() == ("134\n", "")
    three_wait_for_the_third(tmp_path)
    main(str(tmp_path), "134", str(tmp_path))
    out, err = capsys.readouterr()
    assert out == "134\n" and err.startswith("megascale: rank 3 never joined all_reduce 1 of group dp")
    leave(tmp_path, 1, exit_status=3)
    main(str(tmp_path), "134", str(tmp_path))
    assert capsys.readouterr() == ("3\n", "megascale: rank 1 on h failed: error of 1\n")
