"""Failure reports: the error file of a failed rank, and the root cause of several failures.

When a rank dies its peers fail next and blame their own peers. A rank therefore writes an error file with the time and
with a flag for a lost peer. The root cause is the first error without the flag, else a rank that a signal killed. When
a rank is stuck, NCCL's watchdog ends the waiting ranks by SIGABRT; the root cause is then the rank that NCCL's flight
recorder shows as missing.
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
"""Environment variable: path of this rank's error file; `%t` stands for the rank."""

TORCHRUN_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable: path of torchrun's error file, in torchrun's format, for torchrun's summary."""

PEER_LOST_DELAY_S = 1.5
"""Seconds by which a rank with a lost peer delays its exit: torchrun and srun blame the first rank to exit."""

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
    """The failure of a rank. `unexplained`: the rank wrote no error file."""

    rank: int
    host: str
    message: str
    exit_status: int
    unexplained: bool = False


def exit_status_of(error: BaseException) -> int:
    """Return the exit status of a process for an error."""
    return int(error.exit_status) if isinstance(error, MegascaleError) else int(Exit.UNCLASSIFIED)


def is_peer_lost(error: BaseException) -> bool:
    """Return True if an error only reports the loss of another rank."""
    text = str(error).lower()
    return (
        not isinstance(error, MegascaleError)
        and isinstance(error, RuntimeError | OSError)
        and any(phrase in text for phrase in _PEER_LOST)
    )


def write_error(error: BaseException, rank: Rank) -> None:
    """Write this rank's error to the launcher's files. If the rank only lost a peer, delay by PEER_LOST_DELAY_S."""
    ours = isinstance(error, MegascaleError)
    text = str(error) if ours else "".join(traceback.format_exception_only(error)).strip()
    peer_lost = is_peer_lost(error)
    if path := os.environ.get(ERROR_FILE):
        record = {
            "time": time.time(),
            "rank": rank.rank,
            "host": rank.host,
            "what": text,
            "exit_status": exit_status_of(error),
            "peer_was_lost": peer_lost,
        }
        write_text(Path(path.replace("%t", str(rank.rank))), json.dumps(record))
    if peer_lost:
        time.sleep(PEER_LOST_DELAY_S)
    if path := os.environ.get(TORCHRUN_ERROR_FILE):
        message = f"{rank}: {'lost another rank: ' if peer_lost else ''}{text}"
        torchrun_error = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        write_text(Path(path), json.dumps(torchrun_error))


def root_cause(
    logs: Path, signals: Mapping[int, int], exit_codes: Mapping[int, int], dump_folder: Path | None = None
) -> Failure:
    """Return the failure that caused the other failures; if all ranks raised the same error, the lowest rank's.

    `signals`: signal numbers by killed rank. `exit_codes`: exit statuses by rank. `dump_folder`: dumps of the flight
    recorder. A rank killed by SIGABRT either waited for a stuck rank, or failed in C++.
    """
    host = os.uname().nodename
    errors = _errors(logs)
    causes = [error for error in errors if not error["peer_was_lost"]]
    if causes:
        error = min((error for error in causes if error["what"] == causes[0]["what"]), key=lambda error: error["rank"])
        return Failure(error["rank"], error["host"], error["what"], error["exit_status"])
    killed = {rank: number for rank, number in signals.items() if number != signal.SIGABRT}
    if not killed and dump_folder is not None and (suspect := _find_suspect(dump_folder)):
        message = f"killed by SIGABRT; {suspect.reason}" if suspect.rank in signals else suspect.reason
        return Failure(suspect.rank, suspect.host or host, message, Exit.UNCLASSIFIED, unexplained=True)
    for rank, number in (killed or signals).items():
        message = f"killed by {signal.Signals(number).name}"
        return Failure(rank, host, message, Exit.UNCLASSIFIED, unexplained=True)
    silent = [rank for rank, code in exit_codes.items() if code > 0 and rank not in {e["rank"] for e in errors}]
    for rank in silent:
        message = f"ended with status {exit_codes[rank]} and no error"
        return Failure(rank, host, message, exit_codes[rank], unexplained=True)
    for error in errors:
        return Failure(error["rank"], error["host"], error["what"], error["exit_status"])
    rank = next(rank for rank, code in exit_codes.items() if code)
    return Failure(rank, host, f"ended with status {exit_codes[rank]}", Exit.UNCLASSIFIED, unexplained=True)


def _find_suspect(dumps: Path) -> flight.Suspect | None:
    """Return the rank that other ranks waited for, by the flight recorder; None, and a line on stderr, if its files
    cannot be analysed: the failure report must not fail.
    """
    try:
        return flight.find_suspect(dumps)
    except Exception as error:
        print(f"megascale: the flight records in {dumps} cannot be analysed: {error!r}"[:300], file=sys.stderr)
        return None


def _errors(logs: Path) -> list[dict[str, Any]]:
    """Read the ranks' error files, the earliest error first."""
    errors = [json.loads(path.read_text(encoding="utf-8")) for path in logs.glob("rank-*.error.json")]
    return sorted(errors, key=lambda error: error["time"])


def main(logs: str, status: str, dump_folder: str = "") -> None:
    """Report the first failure on stderr, and print the job's exit status: the failed rank's, else `status`.
    `dump_folder`: dumps of the flight recorder.

    srun's own status is the highest of its tasks, often of a task that srun ended after the first failure.
    """
    causes = [error for error in _errors(Path(logs)) if not error["peer_was_lost"]]
    for error in causes[:1]:
        print(f"megascale: rank {error['rank']} on {error['host']} failed: {error['what']}", file=sys.stderr)
        status = error["exit_status"]
    if not causes and status != "0" and dump_folder and (suspect := _find_suspect(Path(dump_folder))):
        print(f"megascale: {suspect}", file=sys.stderr)
    print(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
