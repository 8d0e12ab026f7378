"""What ranks write of their ends, and the report of the first failure under srun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import DataError, Exit, LostPeerError
from megascale.core.rank import Rank
from megascale.operate.diagnose.hang import flight
from megascale.operate.node.failure import ERROR_FILE, is_peer_lost, read_records, write_end, write_error
from megascale.operate.node.rank_ends import describe_status, main
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


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (7, "ended with status 7 and no error"),
        (2, "ended with status 2; its output says why"),
        (-7, "killed by SIGBUS: a file that it maps, such as a dataset, was cut short, or /dev/shm is full"),
        (0, "ended with status 0 and no error, before the job's end"),
        (143, "ended with status 143 and no error, before the job's end"),
        (-9, "killed by SIGKILL (by the kernel, if memory ran out: see dmesg)"),
        (-40, "killed by signal 40"),  # as a real-time signal, which has no name
    ],
)
def test_how_a_rank_ended_that_has_not_said_so(status: int, message: str) -> None:
    assert describe_status(status) == message


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
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "rank-%t.error.json"))
    write_error(DataError("no text", hint="--key NAME"), Rank(2, 4, 2, "node7"))
    record = read_records(tmp_path)[2]
    assert (record["host"], record["exit_status"], record["what"]) == ("node7", Exit.DATA, "no text  -> --key NAME")
    write_end(Rank(2, 4, 2, "node7"), 143)
    record = read_records(tmp_path)[2]
    assert (record["exit_status"], record["what"]) == (143, "")


def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    """As on a file system that is away."""
    leave(tmp_path, 0, time=3.0, peer_was_lost=True)
    (tmp_path / "rank-1.error.json").mkdir()
    (tmp_path / "rank-2.error.json").write_text('{"time": 1')
    assert read_records(tmp_path).keys() == {0}


def three_wait_for_the_third(folder: Path) -> None:
    for rank in (0, 1, 2):
        recorder = Recorder(rank, "node7", dp=[0, 1, 2, 3])
        recorder.collective("dp", done=False)
        recorder.write(folder)


def test_a_report_is_not_lost_to_a_bad_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(folder: Path) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(flight, "find_suspect", broken)
    main(str(tmp_path), "134", str(tmp_path))
    out, err = capsys.readouterr()
    assert out == "134\n"
    assert err == f"megascale: the flight records in {tmp_path} cannot be analysed: RecursionError('too deep')\n"


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
