"""Ends of ranks as they are reported: the status, the rank's own error, its last lines and their observations.

`python -m megascale.operate.node.rank_ends` reports the first failure under srun (launch/slurm.sbatch).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megascale.core.errors import Exit, MegascaleError
from megascale.core.limits import os_error_hint
from megascale.core.rank import format_ranks
from megascale.core.run_folder import LostFolderError
from megascale.operate.channel.messages import RankEnd, Start
from megascale.operate.diagnose.hang import flight
from megascale.operate.health.observations import LAST_LINES, observe, read_tail
from megascale.operate.node.failure import ERROR_FILE, ERROR_FILE_NAME, TORCHRUN_ERROR_FILE, read_record, read_records

OOM_KILL = "linux_oom_kill"  # the observation that the kernel has killed a process for its memory
STORAGE_ERROR = "storage_error"  # the observation that the file system of the run's folder cannot be used
SPACE_BYTES = 64 << 10  # bytes for what a rank writes of its start and its end

_IN_ORDER = (Exit.OK, Exit.STOPPED)
_STOPS = (Exit.STOPPED, Exit.INTERRUPTED)
_REPORTED = (Exit.CONFIG, Exit.DATA, Exit.CHECKPOINT, Exit.DO_NOT_REQUEUE)


def describe_end(
    rank: int, status: int | None, at: float, error_file: Path | None, log: Path | None = None, *, since: float = 0.0,
    oom_killed: bool = False, stopped: bool = False,
) -> RankEnd:  # fmt: skip
    """Return what is known of the end of a rank that ran from `since` to `at`, in seconds since the epoch. `status`:
    None if only its parent knows it. `error_file`: in which the rank may have written its end; `log`: file of its
    output; None if it has none, or it cannot be read here. `oom_killed`: the kernel has killed a process of the rank's
    control group since its start. `stopped`: by order.
    """
    lines = read_tail(log) if log is not None else []
    try:
        record = read_record(error_file) if error_file is not None else None
    except (OSError, ValueError) as error:
        return unread_end(rank, status, at, str(error), lines, oom_killed=oom_killed, stopped=stopped)
    if record is None and status and status > 0 and log is not None and not stopped:
        try:
            check_space(log.parent)
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            return unread_end(rank, status, at, why, lines, oom_killed=oom_killed, stopped=stopped)
    said = [*lines, record["what"]] if record else lines
    patterns = _patterns(said, status, oom_killed=oom_killed, stopped=stopped)
    last_lines = tuple(lines[-LAST_LINES:])
    if record is None or record["time"] < since:
        return RankEnd(rank, status, at, last_lines=last_lines, patterns=patterns, stopped=stopped)
    return RankEnd(
        rank,
        record["exit_status"] if status is None else status,
        min(at, record["time"]),
        error=record["what"] or None,
        error_kind=record["kind"],
        peer_lost=record["peer_was_lost"],
        peers=tuple(record["peers"]),
        named=tuple(record["named"]),
        exit_status=record["exit_status"],
        in_order=not record["what"] and status in (None, record["exit_status"]),
        last_lines=last_lines,
        patterns=patterns,
        stopped=stopped,
    )


def error_file(logs: Path, rank: int) -> Path:
    """Return the file in a launcher's folder of logs in which a rank says how it ended."""
    return logs / ERROR_FILE_NAME.format(rank)


def prepare_logs(order: Start, node: str, *, restore: bool) -> None:
    """Find the run's folder, with space for the files of ranks; make the folder of logs, and remove what ranks of these
    numbers wrote of their ends. `restore`: a folder that is lost is made anew, if copies in memory are here.

    Raises: OSError, CheckpointError
    """
    logs = Path(order.logs)
    if (folder := order.folder) is not None:
        try:
            folder.read_again()
        except LostFolderError:
            if not (restore and folder.restore(node)):
                raise
    logs.mkdir(parents=True, exist_ok=True)
    check_space(logs)
    for rank in order.ranks:
        error_file(logs, rank).unlink(missing_ok=True)


def unusable_logs(logs: Path, error: OSError | RuntimeError, why: str) -> MegascaleError:
    """Return the error about a folder of logs. `why`: unless the system says it."""
    hint = os_error_hint(error, "see the file system") if isinstance(error, OSError) else "see the file system"
    why, where = getattr(error, "strerror", None) or why, getattr(error, "filename", None) or logs
    return MegascaleError(f"the folder of logs cannot be used: {why}: {where}", hint=hint)


def check_space(logs: Path) -> None:
    """Check that there is space for the files in which ranks say how they ended. Raises: OSError with the folder"""
    try:
        with tempfile.TemporaryFile(dir=logs) as file:
            file.write(bytes(SPACE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(logs)) from None


def unread_end(
    rank: int, status: int | None, at: float, why: str, lines: Sequence[str] = (), *, oom_killed: bool = False,
    stopped: bool = False,
) -> RankEnd:  # fmt: skip
    """Return the end of a rank whose error file cannot be read: a fault of storage, whatever ended the rank. `lines`:
    of its output.
    """
    patterns = _patterns(lines, status, oom_killed=oom_killed, stopped=stopped)
    last_lines = (*lines, f"how rank {rank} ended cannot be read: {why}")[-LAST_LINES:]
    patterns = tuple(dict.fromkeys((*patterns, STORAGE_ERROR)))
    return RankEnd(rank, status, at, last_lines=last_lines, patterns=patterns, stopped=stopped)


def _patterns(lines: Sequence[str], status: int | None, *, oom_killed: bool, stopped: bool) -> tuple[str, ...]:
    patterns = observe(lines)
    if oom_killed and status == -signal.SIGKILL and not stopped and OOM_KILL not in patterns:
        patterns = (OOM_KILL, *patterns)
    return patterns


def failed_start(rank: int, error: MegascaleError, *patterns: str) -> RankEnd:
    """Return the end of a rank that could not be started. `patterns`: observations beside those in the error."""
    kind, seen = type(error).__name__, (*patterns, *observe([error.message]))
    status = int(error.exit_status)
    return RankEnd(
        rank, Exit.UNCLASSIFIED, time.time(), str(error), kind, exit_status=status, patterns=seen, started=False
    )


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


def describe_status(status: int | None) -> str:
    """Return how a rank ended that has not said so."""
    if status is not None and status < 0:
        if status == -signal.SIGBUS:
            return "killed by SIGBUS: a file that it maps, such as a dataset, was cut short, or /dev/shm is full"
        kernel = " (by the kernel, if memory ran out: see dmesg)" if status == -signal.SIGKILL else ""
        return f"killed by {how_ended(status)}{kernel}"
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
