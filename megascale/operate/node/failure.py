"""Failure reports: the file in which a rank says how it ended, and the report of the first failure under srun.

When a rank ends its peers fail next and blame their own peers. A rank therefore writes a file as it ends: the time, and
an error, a stop or an end in order, with a flag for a lost peer. The first cause (`driver.classify`) is the first error
without the flag, or a rank that ended before without a file, whatever its status: a library may have called
`os._exit(0)`. When a rank is stuck, NCCL's watchdog ends the waiting ranks by SIGABRT; the cause is then the rank that
NCCL's flight recorder shows as missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megascale.core.errors import CorruptStateError, Exit, LostPeerError, MegascaleError
from megascale.core.files import write_text
from megascale.core.rank import Rank, format_ranks
from megascale.operate.diagnose.hang import flight

ERROR_FILE = "MEGASCALE_ERROR_FILE"
"""Environment variable: path of the file in which this rank says how it ended; `%t` stands for the rank."""

ERROR_FILE_NAME = "rank-{}.error.json"
"""Name of that file in the launcher's folder of logs."""

TORCHRUN_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable: path of torchrun's error file, in torchrun's format, for torchrun's summary. It holds what our
own file does, too, for observers.
"""

PEER_LOST_DELAY_S = 1.5
"""Seconds by which a rank with a lost peer delays its exit: torchrun and srun blame the first rank to exit."""

_IN_ORDER = (Exit.OK, Exit.STOPPED)
_STOPS = (Exit.STOPPED, Exit.INTERRUPTED)
_REPORTED = (Exit.CONFIG, Exit.DATA, Exit.CHECKPOINT, Exit.DO_NOT_REQUEUE)

_PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "software caused connection abort",
    "no route to host",
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


def exit_status_of(error: BaseException) -> int:
    """Return the exit status of a process for an error."""
    return int(error.exit_status) if isinstance(error, MegascaleError) else int(Exit.UNCLASSIFIED)


def is_peer_lost(error: BaseException) -> bool:
    """Return True if an error only reports the loss of another rank."""
    if isinstance(error, MegascaleError):
        return isinstance(error, LostPeerError)
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(phrase in text for phrase in _PEER_LOST)


def write_error(error: BaseException, rank: Rank, explain: Callable[[], str] = str) -> str:
    """Write this rank's error to the launcher's files, and return what is known of it.

    If the rank only lost a peer, delay by PEER_LOST_DELAY_S. `explain`: called meanwhile, to say more of the lost peer.
    """
    ours = isinstance(error, MegascaleError)
    text = str(error) if ours else "".join(traceback.format_exception_only(error)).strip()
    peer_lost = is_peer_lost(error)
    peers = list(error.peers) if isinstance(error, LostPeerError) else []
    named = list(error.ranks) if isinstance(error, CorruptStateError) else []
    more = {"kind": type(error).__name__, "peer_was_lost": peer_lost, "peers": peers, "named": named}
    record = _write_record(rank, text, exit_status_of(error), more)
    said = f"{rank}: {text}"
    if peer_lost:
        until = time.monotonic() + PEER_LOST_DELAY_S
        explanation = explain()
        text += explanation
        # torchrun's summary calls the first rank that failed the root cause, and never one that ended with status 0
        said = f"the cause: {explanation.lstrip('; ') or 'another rank'}. {rank}: lost another rank: {text}"
        time.sleep(max(0.0, until - time.monotonic()))
    if path := os.environ.get(TORCHRUN_ERROR_FILE):
        torchrun_error = {"message": said, "extraInfo": {"timestamp": str(int(time.time()))}}
        write_text(Path(path), json.dumps({"message": torchrun_error, **record}))
    return text


def write_stop(message: str, status: int, rank: Rank) -> bool:
    """Write that a signal ended this rank outside of training. Returns True if a launcher reads and reports it."""
    _write_record(rank, message, status)
    return ERROR_FILE in os.environ


def write_end(rank: Rank, status: int) -> None:
    """Write that this rank has left the job in order: a rank that ends without is the first to have failed."""
    _write_record(rank, "", status)


_NO_ERROR: Mapping[str, Any] = {"kind": "", "peer_was_lost": False, "peers": [], "named": []}


def _write_record(rank: Rank, what: str, status: int, more: Mapping[str, Any] = _NO_ERROR) -> dict[str, Any]:
    """Write the record of this rank's end to the launcher's file, if it has named one, and return it."""
    record = {
        "time": time.time(), "rank": rank.rank, "host": rank.host, "what": what, "exit_status": status, **more
    }  # fmt: skip
    if path := os.environ.get(ERROR_FILE):
        write_text(Path(path.replace("%t", str(rank.rank))), json.dumps(record))
    return record


def how_ended(status: int | None) -> str:
    """Return the name of the signal that ended a process, or "status N"."""
    names = {-number.value: number.name for number in signal.Signals}  # real-time signals have no names of their own
    if status is not None and status < 0:
        return names.get(status, f"signal {-status}")
    return "unknown status" if status is None else f"status {status}"


def error_file_of(pid: int, rank: int) -> Path | None:
    """Return the error file that a rank's launcher has named in the environment of its process: ours, else torchrun's;
    None without one.
    """
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
        env = dict(variable.split("=", 1) for variable in variables if "=" in variable)
        if path := env.get(ERROR_FILE) or env.get(TORCHRUN_ERROR_FILE):
            return Path(path.replace("%t", str(rank)))
    return None


def read_record(path: Path) -> dict[str, Any] | None:
    """Return what a rank wrote of its end: `time`, `rank`, `host`, `what` (the error, "" for an end in order), `kind`
    (the error's class), `exit_status`, `peer_was_lost`, `peers`, `named` (ranks whose state the error calls wrong);
    None if it wrote nothing.

    Raises: OSError or ValueError if its file cannot be read
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def describe_status(status: int | None) -> str:
    """Return how a rank ended that has not said so."""
    if status is not None and status < 0:
        if status == -signal.SIGBUS:
            return "killed by SIGBUS: a file that it maps, such as a dataset, was cut short, or /dev/shm is full"
        return f"killed by {how_ended(status)}"
    if status in _REPORTED:  # its file could not be written, as on a full disk
        return f"ended with status {status}; its output says why"
    return f"ended with {how_ended(status)} and no error" + (", before the job's end" if status in _IN_ORDER else "")


def try_find_suspect(dumps: Path) -> flight.Suspect | None:
    """Return the rank that other ranks waited for, by the flight recorder; None, and a line on stderr, if its files
    cannot be analysed: the failure report must not fail.
    """
    try:
        return flight.find_suspect(dumps)
    except Exception as error:
        print(f"megascale: the flight records in {dumps} cannot be analysed: {error!r}"[:300], file=sys.stderr)
        return None


def read_records(logs: Path) -> dict[int, dict[str, Any]]:
    """Read the ranks' files by rank, the earliest first, without those that cannot be read."""
    records = [_read_known(path) for path in logs.glob(ERROR_FILE_NAME.format("*"))]
    known = [record for record in records if record is not None]
    return {record["rank"]: record for record in sorted(known, key=lambda record: record["time"])}


def _read_known(path: Path) -> dict[str, Any] | None:
    """Read a rank's file; None if it does not exist, or cannot be read, as on a file system that is away."""
    with contextlib.suppress(OSError, ValueError):
        return read_record(path)
    return None


def main(logs: str, status: str, dump_folder: str = "", tasks: str = "0") -> None:
    """Report the first failure on stderr, and print the job's exit status: the failed rank's, else `status`.
    `dump_folder`: dumps of the flight recorder. `tasks`: number of ranks.

    srun's own status is the highest of its tasks, often of a task that srun ended after the first failure.
    """
    records = read_records(Path(logs))
    errors = [record for record in records.values() if record["what"]]
    causes = [error for error in errors if not error["peer_was_lost"]]
    silent = [rank for rank in range(int(tasks)) if rank not in records]
    if silent:  # srun sends the others a signal when a task ends
        causes = [error for error in causes if error["exit_status"] not in _STOPS]
    for error in causes[:1]:
        print(f"megascale: rank {error['rank']} on {error['host']} failed: {error['what']}", file=sys.stderr)
        status = error["exit_status"]
    if not causes and status != "0" and dump_folder and (suspect := try_find_suspect(Path(dump_folder))):
        print(f"megascale: {suspect}", file=sys.stderr)
    elif not causes and errors and silent:
        what = "ended, or was stuck, without an error" if len(silent) == 1 else "ended, or were stuck, without an error"
        print(f"megascale: {format_ranks(silent)} {what}; other ranks then lost a rank", file=sys.stderr)
    print(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
