"""What a failed rank leaves behind, and which of several failures came first.

When a rank dies its neighbours fail next, each blaming its own neighbour. A rank therefore writes its error with the
time and with whether it only lost a peer; the cause is the rank that a signal killed, else the first error that is its
own. When a rank is stuck, NCCL's watchdog ends those that wait for it by SIGABRT; the cause is then the rank for which
they waited, as the flight recorder says.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.core.errors import Exit, MegascaleError
from megascale.core.files import write_text
from megascale.core.rank import Rank
from megascale.launch import flight

ERROR_FILE = "MEGASCALE_ERROR_FILE"
"""Environment variable: where this rank writes its error; `%t` in it is the rank."""

TORCHRUN_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""torchrun's own, in its own format: what its summary shows of a rank."""

SETTLE = 1.5
"""Seconds by which a rank that lost another one leaves later: torchrun and srun blame whoever leaves first."""

_PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "application timeout caused pair closure",
    "gloo connectfullmesh failed",
    "nccl communicator was aborted",
    "collective operation timeout",
    "remote process exited",
    "failed to recv",
    "wait timeout after",
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
    """Leave this rank's error in the files that launchers ask for. A rank that only lost another waits a moment."""
    own = isinstance(error, MegascaleError)
    what = str(error) if own else "".join(traceback.format_exception_only(error)).strip()
    lost = peer_was_lost(error)
    if path := os.environ.get(ERROR_FILE):
        record = {
            "time": time.time(),
            "rank": rank.rank,
            "host": rank.host,
            "what": what,
            "exit_status": exit_status_of(error),
            "peer_was_lost": lost,
        }
        write_text(Path(path.replace("%t", str(rank.rank))), json.dumps(record))
    if lost:
        time.sleep(SETTLE)
    if path := os.environ.get(TORCHRUN_ERROR_FILE):
        message = f"{rank}: {'lost another rank: ' if lost else ''}{what}"
        theirs = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        write_text(Path(path), json.dumps(theirs))


def first_cause(logs: Path, died: Mapping[int, int], codes: Mapping[int, int], dumps: Path | None = None) -> Failure:
    """The failure that caused the others; of an error that all ranks found together the lowest rank's. `died`: ranks
    that a signal killed, with its number; `codes`: exit statuses; `dumps`: the flight recorder's folder.

    A rank that SIGABRT ended may have been waiting for one that never came, or have failed itself, in C++.
    """
    host = os.uname().nodename
    errors = _errors(logs)
    own = [error for error in errors if not error["peer_was_lost"]]
    if own:
        error = min((error for error in own if error["what"] == own[0]["what"]), key=lambda error: error["rank"])
        return Failure(error["rank"], error["host"], error["what"], error["exit_status"])
    killed = {rank: number for rank, number in died.items() if number != signal.SIGABRT}
    if not killed and dumps is not None and (suspect := _awaited(dumps)):
        what = f"killed by SIGABRT; {suspect.what}" if suspect.rank in died else suspect.what
        return Failure(suspect.rank, suspect.host or host, what, Exit.UNCLASSIFIED, unexplained=True)
    for rank, number in (killed or died).items():
        what = f"killed by {signal.Signals(number).name}"
        return Failure(rank, host, what, Exit.UNCLASSIFIED, unexplained=True)
    silent = [rank for rank, code in codes.items() if code > 0 and rank not in {e["rank"] for e in errors}]
    for rank in silent:
        return Failure(rank, host, f"ended with status {codes[rank]} and no error", codes[rank], unexplained=True)
    for error in errors:
        return Failure(error["rank"], error["host"], error["what"], error["exit_status"])
    rank = next(rank for rank, code in codes.items() if code)
    return Failure(rank, host, f"ended with status {codes[rank]}", Exit.UNCLASSIFIED, unexplained=True)


def _awaited(dumps: Path) -> flight.Suspect | None:
    """The rank that others waited for, by the flight recorder. Whatever is wrong with its files, the rest of the report
    of a failure must not be lost to it.
    """
    try:
        return flight.find(dumps)
    except Exception as error:
        print(f"megascale: the flight records in {dumps} say nothing: {error!r}"[:300], file=sys.stderr)
        return None


def _errors(logs: Path) -> list[dict[str, Any]]:
    """What the ranks wrote, the earliest first."""
    errors = [json.loads(path.read_text(encoding="utf-8")) for path in logs.glob("rank-*.error.json")]
    return sorted(errors, key=lambda error: error["time"])


def main(logs: str, status: str, dumps: str = "") -> None:
    """Say which rank failed first, and print the status of the job: that rank's own, else the one given. `dumps`: the
    flight recorder's folder.

    srun ends with the highest status of its tasks, which is that of those it ended itself after the first failure.
    """
    own = [error for error in _errors(Path(logs)) if not error["peer_was_lost"]]
    for error in own[:1]:
        print(f"megascale: rank {error['rank']} on {error['host']} failed: {error['what']}", file=sys.stderr)
        status = error["exit_status"]
    if not own and status != "0" and dumps and (suspect := _awaited(Path(dumps))):
        print(f"megascale: {suspect}", file=sys.stderr)
    print(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
