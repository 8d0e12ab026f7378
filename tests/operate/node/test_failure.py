"""The root cause of several failures."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import DataError, Exit, LostPeerError
from megascale.core.rank import Rank
from megascale.operate.diagnose.hang import flight
from megascale.operate.node.failure import (
    ERROR_FILE,
    ProcessEnd,
    has_left_in_order,
    is_peer_lost,
    main,
    root_cause,
    write_end,
    write_error,
)
from tests.operate.diagnose.hang.dumps import Recorder


def leave(logs: Path, rank: int, **record: Any) -> None:
    full = {
        "time": 1.0,
        "rank": rank,
        "host": "h",
        "what": f"error of {rank}",
        "exit_status": 1,
        "peer_was_lost": False,
        "peers": [],
        "named": [],
    }
    (logs / f"rank-{rank}.error.json").write_text(json.dumps(full | record))


def ends(**by_rank: int | tuple[int, float]) -> dict[int, ProcessEnd]:
    """Ends of ranks: status, or (status, time), by names such as r0; a rank's error file is of time 1 by default."""
    both = {int(name[1:]): value if isinstance(value, tuple) else (value, 2.0) for name, value in by_rank.items()}
    return {rank: ProcessEnd(*value) for rank, value in both.items()}


def test_the_first_own_error_wins(tmp_path: Path) -> None:
    leave(tmp_path, 0, time=1.0, peer_was_lost=True)
    leave(tmp_path, 1, time=3.0)
    leave(tmp_path, 2, time=2.0, exit_status=3)
    cause = root_cause(tmp_path, ends(r0=1, r1=1, r2=3))
    assert (cause.rank, cause.message, cause.exit_status) == (2, "error of 2", 3)


def test_a_killed_rank_before_those_that_lost_it(tmp_path: Path) -> None:
    leave(tmp_path, 0, peer_was_lost=True)
    cause = root_cause(tmp_path, ends(r0=1, r3=-6))
    assert (cause.rank, cause.message, cause.unexplained) == (3, "killed by SIGABRT", True)


@pytest.mark.parametrize(
    ("status", "exit_status", "message"),
    [
        (7, 7, "ended with status 7 and no error"),
        (2, 2, "ended with status 2; its output says why"),
        (-7, 1, "killed by SIGBUS: a file that it maps, such as a dataset, was cut short, or /dev/shm is full"),
        (0, 1, "ended with status 0 and no error, before the job's end"),
        (143, 143, "ended with status 143 and no error, before the job's end"),
        (-9, 1, "killed by SIGKILL"),
    ],
)
def test_the_first_to_leave_in_silence_is_the_cause_whatever_its_status(
    status: int, exit_status: int, message: str, tmp_path: Path
) -> None:
    leave(tmp_path, 0, peer_was_lost=True)
    leave(tmp_path, 2, time=3.0)  # an error that followed
    leave(tmp_path, 3, time=0.5, what="", exit_status=0)  # had left in order
    cause = root_cause(tmp_path, ends(r0=1, r1=(status, 2.0), r2=1, r3=0, r4=(9, 2.5)))
    assert (cause.rank, cause.exit_status, cause.message, cause.unexplained) == (1, exit_status, message, True)


def test_ranks_that_were_killed_beside_the_first_failure_are_named(tmp_path: Path) -> None:
    leave(tmp_path, 2)
    assert root_cause(tmp_path, ends(r0=-9, r2=1, r3=-9)).killed == (0, 3)
    cause = root_cause(tmp_path, ends(r0=(-9, 0.5), r2=1, r3=(-9, 0.6), r4=-6))
    assert (cause.rank, cause.killed) == (0, (3,))


def test_a_signal_without_a_name_is_reported_by_its_number(tmp_path: Path) -> None:
    """As a real-time signal."""
    assert root_cause(tmp_path, ends(r1=-40)).message == "killed by signal 40"


def test_an_error_before_a_silent_end(tmp_path: Path) -> None:
    leave(tmp_path, 2)
    assert root_cause(tmp_path, ends(r1=0, r2=1)).rank == 2


def test_only_lost_peers(tmp_path: Path) -> None:
    leave(tmp_path, 1, time=2.0, peer_was_lost=True)
    leave(tmp_path, 0, time=1.0, peer_was_lost=True)
    assert root_cause(tmp_path, ends(r0=1, r1=1)).rank == 0


def test_a_rank_that_does_not_answer_is_the_one_that_the_others_name(tmp_path: Path) -> None:
    leave(tmp_path, 0, peer_was_lost=True, peers=[1, 2])
    leave(tmp_path, 1, time=2.0, peer_was_lost=True, peers=[3])
    leave(tmp_path, 2, time=3.0, peer_was_lost=True, peers=[0])
    cause = root_cause(tmp_path, ends(r0=1, r1=1, r2=1))
    assert (cause.rank, cause.message) == (3, "does not answer: error of 0")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:7342. This is typically caused by"), True),
        (RuntimeError("remote process exited: group rank 1, pid 7"), True),
        (RuntimeError("[pair.cc:537] Read error [10.77.0.1]:23427: Software caused connection abort. This is"), True),
        (
            RuntimeError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE"),
            True,
        ),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("connection closed by peer"), False),
        (DataError("the socket corpus is empty"), False),
        (LostPeerError("no phrase that a library uses", peers=(1,)), True),
    ],
)
def test_errors_of_a_lost_peer(error: Exception, lost: bool) -> None:
    assert is_peer_lost(error) is lost


def test_an_error_is_written_with_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "rank-2.error.json"))
    write_error(DataError("no text", hint="--key NAME"), Rank(2, 4, 2, "node7"))
    cause = root_cause(tmp_path, ends(r2=3))
    assert (cause.rank, cause.host, cause.exit_status) == (2, "node7", Exit.DATA)
    assert cause.message == "no text  -> --key NAME"


def test_an_end_in_order_is_written_with_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_left_in_order(tmp_path, 2, ProcessEnd(0, 1.0))
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "rank-%t.error.json"))
    write_end(Rank(2, 4, 2, "node7"), 143)
    assert has_left_in_order(tmp_path, 2, ProcessEnd(143, 1.0))
    assert not has_left_in_order(tmp_path, 2, ProcessEnd(-11, 1.0)), "it crashed as it ended"


def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    """As on a file system that is away: the ranks' ends are known all the same."""
    leave(tmp_path, 0, time=3.0, peer_was_lost=True)
    (tmp_path / "rank-1.error.json").mkdir()
    (tmp_path / "rank-2.error.json").write_text('{"time": 1')
    assert not has_left_in_order(tmp_path, 1, ProcessEnd(0, 1.0))
    cause = root_cause(tmp_path, ends(r0=(1, 3.0), r1=(-9, 1.0), r2=(1, 2.0)))
    assert (cause.rank, cause.message) == (1, "killed by SIGKILL")


def three_wait_for_the_third(folder: Path) -> None:
    for rank in (0, 1, 2):
        recorder = Recorder(rank, "node7", dp=[0, 1, 2, 3])
        recorder.collective("dp", done=False)
        recorder.write(folder)


ABORTED = {rank: ProcessEnd(-signal.SIGABRT, 2.0) for rank in (0, 1, 2)}


def test_a_stuck_rank_before_those_whose_watchdogs_ended_them(tmp_path: Path) -> None:
    three_wait_for_the_third(tmp_path)
    cause = root_cause(tmp_path, ABORTED, tmp_path)
    assert (cause.rank, cause.unexplained) == (3, True)
    assert cause.message.startswith("never joined all_reduce 1 of group dp, in which ranks 0, 1, 2 wait since ")
    Recorder(3, "node8", dp=[0, 1, 2, 3]).write(tmp_path)
    assert root_cause(tmp_path, ABORTED, tmp_path).host == "node8"


def test_without_dumps_the_first_that_aborted(tmp_path: Path) -> None:
    cause = root_cause(tmp_path, ABORTED, tmp_path)
    assert (cause.rank, cause.message) == (0, "killed by SIGABRT")


def test_an_abort_of_its_own_is_both(tmp_path: Path) -> None:
    """The watchdogs of the other ranks may have had time to dump."""
    three_wait_for_the_third(tmp_path)
    cause = root_cause(tmp_path, ends(r1=-signal.SIGABRT, r3=-signal.SIGABRT), tmp_path)
    assert cause.rank == 3 and cause.message.startswith("killed by SIGABRT; never joined all_reduce 1 of group dp")


def test_a_report_is_not_lost_to_a_bad_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(folder: Path) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(flight, "find_suspect", broken)
    cause = root_cause(tmp_path, ABORTED, tmp_path)
    assert (cause.rank, cause.message) == (0, "killed by SIGABRT")
    main(str(tmp_path), "134", str(tmp_path))
    out, err = capsys.readouterr()
    assert out == "134\n"
    assert err == f"megascale: the flight records in {tmp_path} cannot be analysed: RecursionError('too deep')\n" * 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_another_signal_before_what_the_watchdogs_say(number: int, tmp_path: Path) -> None:
    three_wait_for_the_third(tmp_path)
    cause = root_cause(tmp_path, ends(r0=-signal.SIGABRT, r2=-number), tmp_path)
    assert (cause.rank, cause.message) == (2, f"killed by {signal.Signals(number).name}")


def test_a_rank_s_own_error_before_what_the_watchdogs_say(tmp_path: Path) -> None:
    three_wait_for_the_third(tmp_path)
    leave(tmp_path, 2)
    assert root_cause(tmp_path, ABORTED, tmp_path).message == "error of 2"


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


def test_the_report_for_slurm_names_the_ranks_that_said_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(tmp_path, 0, peer_was_lost=True)
    leave(tmp_path, 3, what="", exit_status=0)
    main(str(tmp_path), "1", str(tmp_path), "4")
    silent = "megascale: ranks 1, 2 ended, or were stuck, without an error; other ranks then lost a rank\n"
    assert capsys.readouterr() == ("1\n", silent)


def test_a_signal_by_which_srun_ends_a_rank_is_no_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path, 0, what="stopped by SIGTERM before the first step", exit_status=143)
    leave(tmp_path, 1, what="stopped by SIGTERM before the first step", exit_status=143)
    main(str(tmp_path), "143", str(tmp_path), "2")
    out, err = capsys.readouterr()
    assert out == "143\n" and err.startswith("megascale: rank 0 on h failed: stopped by SIGTERM")
    main(str(tmp_path), "137", str(tmp_path), "3")
    silent = "megascale: rank 2 ended, or was stuck, without an error; other ranks then lost a rank\n"
    assert capsys.readouterr() == ("137\n", silent)
