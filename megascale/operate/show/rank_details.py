"""Facts about one rank: its last state, how it ended, the end of its output, and the stack of its process.

- `read_rank_details`: all but the stack; `details_of`: of a rank whose state is known
- `read_errors`: the errors with which ranks ended
- `read_rank_stack`: the stack of its process, which takes a moment of a core
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.core.run_folder import LOGS
from megascale.operate.driver.incidents import with_evidence
from megascale.operate.health.observations import read_tail
from megascale.operate.node.failure import ERROR_FILE_NAME, read_record, read_records
from megascale.operate.node.stacks import stack_of
from megascale.operate.show.last_states import SHARED, read_last_state
from megascale.operate.show.run_view import RunView
from megascale.record.log_files import local_states
from megascale.record.rank_state import RankState

MOST_LINES = 60  # most lines of output that are shown


@dataclass(frozen=True)
class RankDetails:
    """`state`: the last, None without one. `error`: the error with which the rank ended, "" without one. `stack`: of
    its process, "" if nobody asked for it, or it is not on this host. `output`: the last lines of its `log`.
    `incidents`: in
    which it is a culprit, in words.
    """

    rank: int
    state: RankState | None
    error: str = ""
    stack: str = ""
    log: Path | None = None
    output: tuple[str, ...] = ()
    incidents: tuple[str, ...] = ()


def read_rank_details(view: RunView, rank: int) -> RankDetails:
    """Return what is known about a rank."""
    return details_of(view, rank, read_last_state(view, rank))


def details_of(
    view: RunView, rank: int, state: RankState | None, read_stack: Callable[[int], str] = lambda pid: ""
) -> RankDetails:
    """Return what is known about a rank beside its last state. `read_stack`: of a process on this host."""
    error, log, output = "", None, list[str]()
    for folder in log_folders(view):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a file that cannot be read
            error = error or str((read_record(folder / ERROR_FILE_NAME.format(rank)) or {}).get("what", ""))
        if not output and (lines := read_tail(folder / f"rank-{rank}.log")):
            log, output = folder / f"rank-{rank}.log", lines[-MOST_LINES:]
    stack = read_stack(state.pid) if state is not None and state.source == SHARED else ""
    incidents = tuple(
        with_evidence(f"incident {each.id}, step {each.step}: {each.what}", each.evidence)
        for each in view.incidents
        if rank in each.culprit.ranks
    )
    return RankDetails(rank, state, error, stack, log, tuple(output), incidents)


def log_folders(view: RunView) -> tuple[Path, Path]:
    """Return the folders of logs under a driver, and without one."""
    return view.folder / LOGS / f"attempt-{view.attempt}", view.folder / LOGS


def read_errors(view: RunView, start: float) -> list[Mapping[str, Any]]:
    """Return the errors with which ranks have ended since `start`, the earliest first; without files that cannot be
    read.
    """
    for folder in log_folders(view):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if found := read_records(folder):
                return [error for error in found.values() if error["what"] and error["time"] >= start]
    return []


def read_rank_stack(view: RunView, rank: int, read_stack: Callable[[int], str] = stack_of) -> str:
    """Return the stack of a rank's process, or why there is none. `read_stack`: of a process on this host."""
    state = local_states(view.folder).get(rank) if view.is_live else None
    return f"rank {rank} has no process on this host" if state is None else read_stack(state.pid)
