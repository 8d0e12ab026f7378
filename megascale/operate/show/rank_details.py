"""Facts about one rank: its last state, how it ended, the end of its output, and the stack of its process.

- `read_rank_details`: all but the stack; `details_of`: of a rank whose state is known; `place_in`: its place
- `read_rank_stack`: the stack of its process, which takes a moment of a core
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megascale.core.run_folder import LOGS
from megascale.layout.chunks import stages_of
from megascale.operate.driver.incidents import Incident
from megascale.operate.health.observations import read_tail
from megascale.operate.node.failure import ERROR_FILE_NAME, read_record
from megascale.operate.node.stacks import stack_of
from megascale.operate.show.last_states import SHARED, read_last_state
from megascale.operate.show.neighbours import RankPlace, place_of
from megascale.operate.show.run_view import RunView
from megascale.record.log_files import local_states
from megascale.record.rank_state import RankState

MOST_LINES = 60
"""Most lines of output that are shown."""


@dataclass(frozen=True)
class RankDetails:
    """`state`: the last, None without one. `error`: the error with which the rank ended, "" without one. `stack`: of
    its process, "" if nobody asked for it, or it is not on this host. `output`: the last lines of its `log`.
    `incidents`: in which it is a culprit.
    """

    rank: int
    state: RankState | None
    error: str = ""
    stack: str = ""
    log: Path | None = None
    output: tuple[str, ...] = ()
    incidents: tuple[Incident, ...] = ()


def read_rank_details(view: RunView, rank: int) -> RankDetails:
    """Return what is known about a rank."""
    return details_of(view, rank, read_last_state(view, rank))


def place_in(view: RunView, rank: int) -> RankPlace:
    """Return the place of a rank in the layout of a run. Raises: IndexError for a rank outside the world"""
    config = view.config
    placement = stages_of(config.model, config.parallel).placement if config is not None else None
    return place_of(view.topology, rank, placement)


def details_of(
    view: RunView, rank: int, state: RankState | None, read_stack: Callable[[int], str] = lambda pid: ""
) -> RankDetails:
    """Return what is known about a rank beside its last state. `read_stack`: of a process on this host."""
    error, log, output = "", None, list[str]()
    for folder in log_folders(view):
        error = error or _error(folder, rank)
        if not output and (lines := read_tail(folder / f"rank-{rank}.log")):
            log, output = folder / f"rank-{rank}.log", lines[-MOST_LINES:]
    stack = read_stack(state.pid) if state is not None and state.source == SHARED else ""
    incidents = tuple(each for each in view.incidents if rank in each.culprit.ranks)
    return RankDetails(rank, state, error, stack, log, tuple(output), incidents)


def log_folders(view: RunView) -> tuple[Path, Path]:
    """Return the folders of logs under a driver, and without one."""
    return view.folder / LOGS / f"attempt-{view.attempt}", view.folder / LOGS


def read_rank_stack(view: RunView, rank: int, read_stack: Callable[[int], str] = stack_of) -> str:
    """Return the stack of a rank's process, or why there is none. `read_stack`: of a process on this host."""
    state = local_states(view.folder).get(rank) if view.is_live else None
    return f"rank {rank} has no process on this host" if state is None else read_stack(state.pid)


def _error(logs: Path, rank: int) -> str:
    """Return the error that a rank has left, "" for none, or a file that cannot be read."""
    try:
        return str((read_record(logs / ERROR_FILE_NAME.format(rank)) or {}).get("what", ""))
    except (OSError, ValueError, AttributeError):
        return ""
