"""Ends of ranks as they are reported: the status, the rank's own error, its last lines and their observations."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from megascale.core.errors import Exit, MegascaleError
from megascale.fault.messages import RankEnd
from megascale.fault.observations import LAST_LINES, observe, read_tail
from megascale.launch.failure import ProcessEnd, read_record

OOM_KILL = "linux_oom_kill"
"""The observation that the kernel has killed a process for its memory."""


def describe_end(
    rank: int, end: ProcessEnd, logs: Path, log: Path | None, *, oom_killed: bool = False, stopped: bool = False
) -> RankEnd:
    """Return what is known of the end of a rank. `logs`: folder of its error file; `log`: file of its output, None if
    it cannot be read here. `oom_killed`: the kernel has killed a process of the rank's control group since its start.
    `stopped`: by order.
    """
    lines = read_tail(log) if log is not None else []
    patterns = observe(lines)
    if oom_killed and end.status == -signal.SIGKILL and not stopped and OOM_KILL not in patterns:
        patterns = (OOM_KILL, *patterns)
    last_lines = tuple(lines[-LAST_LINES:])
    record = read_record(logs, rank)
    if record is None:
        return RankEnd(rank, end.status, end.time, last_lines=last_lines, patterns=patterns, stopped=stopped)
    return RankEnd(
        rank,
        end.status,
        min(end.time, record["time"]),
        error=record["what"] or None,
        error_kind=record["kind"],
        peer_lost=record["peer_was_lost"],
        peers=tuple(record["peers"]),
        named=tuple(record["named"]),
        exit_status=record["exit_status"],
        in_order=not record["what"] and record["exit_status"] == end.status,
        last_lines=last_lines,
        patterns=patterns,
        stopped=stopped,
    )


def failed_start(rank: int, error: MegascaleError) -> RankEnd:
    """Return the end of a rank that could not be started."""
    kind = type(error).__name__
    return RankEnd(rank, Exit.UNCLASSIFIED, time.time(), str(error), kind, exit_status=int(error.exit_status))
