"""Which of several failures is shown."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import DataError, Exit
from megascale.core.rank import Rank
from megascale.launch.failure import ERROR_FILE, first_cause, peer_was_lost, write_error


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
    cause = first_cause(tmp_path, {}, {0: 1, 1: 1, 2: 3})
    assert (cause.rank, cause.what, cause.exit_status) == (2, "error of 2", 3)


def test_a_killed_rank_before_those_that_lost_it(tmp_path: Path) -> None:
    leave(tmp_path, 0, peer_was_lost=True)
    cause = first_cause(tmp_path, {3: signal.SIGABRT}, {0: 1, 3: -6})
    assert (cause.rank, cause.what, cause.unexplained) == (3, "killed by SIGABRT", True)


def test_a_silent_exit_before_those_that_lost_it(tmp_path: Path) -> None:
    leave(tmp_path, 0, peer_was_lost=True)
    cause = first_cause(tmp_path, {}, {0: 1, 1: 7})
    assert (cause.rank, cause.exit_status, cause.unexplained) == (1, 7, True)


def test_only_lost_peers(tmp_path: Path) -> None:
    leave(tmp_path, 1, time=2.0, peer_was_lost=True)
    leave(tmp_path, 0, time=1.0, peer_was_lost=True)
    assert first_cause(tmp_path, {}, {0: 1, 1: 1}).rank == 0


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:7342. This is typically caused by"), True),
        (RuntimeError("remote process exited: group rank 1, pid 7"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("connection closed by peer"), False),
        (DataError("the socket corpus is empty"), False),
    ],
)
def test_what_says_that_a_peer_was_lost(error: Exception, lost: bool) -> None:
    assert peer_was_lost(error) is lost


def test_an_error_is_written_with_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "rank-2.error.json"))
    write_error(DataError("no text", mend="--key NAME"), Rank(2, 4, 2, "node7"))
    cause = first_cause(tmp_path, {}, {2: 3})
    assert (cause.rank, cause.host, cause.exit_status) == (2, "node7", Exit.DATA)
    assert cause.what == "no text  -> --key NAME"
