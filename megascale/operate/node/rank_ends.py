"""Ends of ranks as they are reported: the status, the rank's own error, its last lines and their observations."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megascale.core.errors import Exit, MegascaleError
from megascale.operate.channel.messages import RankEnd
from megascale.operate.health.observations import LAST_LINES, observe, read_tail
from megascale.operate.node.failure import read_record

OOM_KILL = "linux_oom_kill"
"""The observation that the kernel has killed a process for its memory."""

STORAGE_ERROR = "storage_error"
"""The observation that the file system of the run's folder cannot be used."""

SPACE_BYTES = 64 << 10
"""Bytes for what a rank writes of its start and its end."""


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
    return RankEnd(
        rank,
        status,
        at,
        last_lines=last_lines,
        patterns=tuple(dict.fromkeys((*patterns, STORAGE_ERROR))),
        stopped=stopped,
    )


def _patterns(lines: Sequence[str], status: int | None, *, oom_killed: bool, stopped: bool) -> tuple[str, ...]:
    patterns = observe(lines)
    if oom_killed and status == -signal.SIGKILL and not stopped and OOM_KILL not in patterns:
        patterns = (OOM_KILL, *patterns)
    return patterns


def failed_start(rank: int, error: MegascaleError, *patterns: str) -> RankEnd:
    """Return the end of a rank that could not be started. `patterns`: observations beside those in the error."""
    kind, seen = type(error).__name__, (*patterns, *observe([error.message]))
    status = int(error.exit_status)
    return RankEnd(rank, Exit.UNCLASSIFIED, time.time(), str(error), kind, exit_status=status, patterns=seen)
