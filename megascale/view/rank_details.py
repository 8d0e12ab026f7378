"""Facts about one rank: its place, its flight record, how it ended, and the end of its output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.core.flight_record import FlightRecord, FlightRecordError
from megascale.eventstore.query import StoreError, fetch, open_store
from megascale.fault.incidents import Incident
from megascale.fault.observations import read_tail
from megascale.launch.failure import read_record
from megascale.view.neighbours import RankPlace, place_of
from megascale.view.rank_states import records_of
from megascale.view.run_view import RunView

if TYPE_CHECKING:
    import duckdb

MOST_LINES = 60
"""Most lines of output that are shown."""


@dataclass(frozen=True)
class RankDetails:
    """`record`: the newest flight record, with its `source`; None without one. `error`: the error with which the rank
    ended, "" without one. `output`: the last lines of its log. `incidents`: in which it is a culprit.
    """

    place: RankPlace
    record: FlightRecord | None = None
    source: str = ""
    error: str = ""
    log: Path | None = None
    output: tuple[str, ...] = ()
    incidents: tuple[Incident, ...] = ()


def read_rank_details(view: RunView, rank: int) -> RankDetails:
    """Return what is known about a rank. Raises: IndexError for a rank outside the world"""
    vpp = view.config.parallel.vpp if view.config is not None else 1
    details = RankDetails(
        place_of(view.topology, rank, vpp),
        incidents=tuple(each for each in view.incidents if rank in each.culprit.ranks),
    )
    record, source = _flight_record(view, rank)
    error, log, output = "", None, list[str]()
    for folder in (view.folder / "logs" / f"attempt-{view.attempt}", view.folder / "logs"):
        error = error or _error(folder, rank)
        if not output and (lines := read_tail(folder / f"rank-{rank}.log")):
            log, output = folder / f"rank-{rank}.log", lines[-MOST_LINES:]
    return replace(details, record=record, source=source, error=error, log=log, output=tuple(output))


def _error(logs: Path, rank: int) -> str:
    """Return the error that a rank has left, "" for none, or a file that cannot be read."""
    try:
        return str((read_record(logs, rank) or {}).get("what", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _flight_record(view: RunView, rank: int) -> tuple[FlightRecord | None, str]:
    """Return the newest flight record of a rank, and where it was found."""
    if view.is_live and (record := records_of(view.name, view.states).get(rank)) is not None:
        return record, "shared memory of this host"
    try:
        store = open_store(view.folder)
    except StoreError:
        return None, ""
    return _stored_record(store, rank), "event store"


def _stored_record(store: duckdb.DuckDBPyConnection, rank: int) -> FlightRecord | None:
    rows = fetch(store, "SELECT record FROM states WHERE rank = ? ORDER BY time_ns DESC LIMIT 1", [rank])
    texts: Sequence[str] = rows["record"].tolist()
    try:
        return FlightRecord.from_dict(json.loads(texts[0])) if texts else None
    except (FlightRecordError, ValueError):
        return None
