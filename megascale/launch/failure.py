"""What a failed rank leaves behind, and which of several failures came first.

When a rank dies its neighbours fail next, each blaming its own neighbour. A rank therefore writes its error with the
time and with whether it only lost a peer; the cause is the rank that a signal killed, else the first error that is its
own.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megascale.core.errors import Exit, MegascaleError
from megascale.core.files import write_text
from megascale.core.rank import Rank

ERROR_FILE = "MEGASCALE_ERROR_FILE"
"""Environment variable: where this rank writes its error."""

_PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "application timeout caused pair closure",
    "gloo connectfullmesh failed",
    "nccl communicator was aborted",
    "remote process exited",
    "failed to recv",
)


@dataclass(frozen=True)
class Failure:
    """The end of one rank. `unexplained`: it left no error of its own."""

    rank: int
    host: str
    what: str
    exit_status: int
    unexplained: bool = False


def exit_status_of(error: BaseException) -> int:
    """The status that a process ends with for an error."""
    return int(error.exit_status) if isinstance(error, MegascaleError) else int(Exit.UNCLASSIFIED)


def peer_was_lost(error: BaseException) -> bool:
    """Whether an error only says that another rank has gone."""
    text = str(error).lower()
    return (
        not isinstance(error, MegascaleError)
        and isinstance(error, RuntimeError | OSError)
        and any(s in text for s in _PEER_LOST)
    )


def write_error(error: BaseException, rank: Rank) -> None:
    """Leave this rank's error for the launcher, if one asks for it."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    record = {
        "time": time.time(),
        "rank": rank.rank,
        "host": rank.host,
        "what": str(error)
        if isinstance(error, MegascaleError)
        else "".join(traceback.format_exception_only(error)).strip(),
        "exit_status": exit_status_of(error),
        "peer_was_lost": peer_was_lost(error),
    }
    write_text(Path(path), json.dumps(record))


def first_cause(logs: Path, died: Mapping[int, int], codes: Mapping[int, int]) -> Failure:
    """The failure that caused the others. `died`: ranks that a signal killed, with its number; `codes`: exit
    statuses.
    """
    host = os.uname().nodename
    errors = [json.loads(path.read_text(encoding="utf-8")) for path in logs.glob("rank-*.error.json")]
    own = sorted((e for e in errors if not e["peer_was_lost"]), key=lambda e: e["time"])
    for error in own:
        return Failure(error["rank"], error["host"], error["what"], error["exit_status"])
    for rank, number in died.items():
        what = f"killed by {signal.Signals(number).name}"
        return Failure(rank, host, what, Exit.UNCLASSIFIED, unexplained=True)
    silent = [rank for rank, code in codes.items() if code > 0 and rank not in {e["rank"] for e in errors}]
    for rank in silent:
        return Failure(rank, host, f"ended with status {codes[rank]} and no error", codes[rank], unexplained=True)
    for error in sorted(errors, key=lambda e: e["time"]):
        return Failure(error["rank"], error["host"], error["what"], error["exit_status"])
    rank = next(rank for rank, code in codes.items() if code)
    return Failure(rank, host, f"ended with status {codes[rank]}", Exit.UNCLASSIFIED, unexplained=True)
