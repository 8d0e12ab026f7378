"""Facts about one rank: its place, its state, how it ended, and the end of its output.

- `read_rank_details`: all of them
- `read_rank_stack`: the stack of its process, which takes a moment of a core
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.core.run_folder import LOGS
from megascale.layout.chunks import stages_of
from megascale.operate.driver.incidents import Incident
from megascale.operate.health.observations import read_tail
from megascale.operate.node.failure import ERROR_FILE_NAME, read_record
from megascale.operate.node.stacks import stack_of
from megascale.operate.show.last_states import SHARED, STORED
from megascale.operate.show.neighbours import RankPlace, place_of
from megascale.operate.show.run_view import RunView
from megascale.operate.store.query import StoreError, fetch
from megascale.operate.store.reading import read_store
from megascale.record.log_files import local_states
from megascale.record.rank_state import LogError, RankState

if TYPE_CHECKING:
    import duckdb

MOST_LINES = 60
"""Most lines of output that are shown."""


@dataclass(frozen=True)
class RankDetails:
    """`state`: the newest, with its `source`; None without one. `error`: the error with which the rank ended, ""
    without one. `output`: the last lines of its log. `incidents`: in which it is a culprit.
    """

    place: RankPlace
    state: RankState | None = None
    error: str = ""
    log: Path | None = None
    output: tuple[str, ...] = ()
    incidents: tuple[Incident, ...] = ()


def read_rank_details(view: RunView, rank: int) -> RankDetails:
    """Return what is known about a rank. Raises: IndexError for a rank outside the world"""
    placement = stages_of(view.config).placement if view.config is not None else None
    details = RankDetails(
        place_of(view.topology, rank, placement),
        incidents=tuple(each for each in view.incidents if rank in each.culprit.ranks),
    )
    state = _state(view, rank)
    error, log, output = "", None, list[str]()
    for folder in (view.folder / LOGS / f"attempt-{view.attempt}", view.folder / LOGS):
        error = error or _error(folder, rank)
        if not output and (lines := read_tail(folder / f"rank-{rank}.log")):
            log, output = folder / f"rank-{rank}.log", lines[-MOST_LINES:]
    return replace(details, state=state, error=error, log=log, output=tuple(output))


def read_rank_stack(view: RunView, rank: int, read_stack: Callable[[int], str] = stack_of) -> str:
    """Return the stack of a rank's process, or why there is none. `read_stack`: of a process on this host."""
    state = _local_state(view, rank)
    return f"rank {rank} has no process on this host" if state is None else read_stack(state.pid)


def _error(logs: Path, rank: int) -> str:
    """Return the error that a rank has left, "" for none, or a file that cannot be read."""
    try:
        return str((read_record(logs / ERROR_FILE_NAME.format(rank)) or {}).get("what", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _local_state(view: RunView, rank: int) -> RankState | None:
    """Return the state of a rank whose process lives on this host."""
    return local_states(view.folder).get(rank) if view.is_live else None


def _state(view: RunView, rank: int) -> RankState | None:
    """Return the newest state of a rank, and where it was found."""
    if (state := _local_state(view, rank)) is not None:
        return replace(state, source=SHARED)
    with contextlib.suppress(StoreError):
        return read_store(view.folder, lambda store: _stored_state(store, rank), tables=("states",)).value
    return None


def _stored_state(store: duckdb.DuckDBPyConnection, rank: int) -> RankState | None:
    rows = fetch(store, "SELECT record FROM states WHERE rank = ? ORDER BY time_ns DESC LIMIT 1", [rank])
    texts: Sequence[str] = rows["record"].tolist()
    try:
        return replace(RankState.from_dict(json.loads(texts[0])), source=STORED) if texts else None
    except (LogError, ValueError):
        return None
