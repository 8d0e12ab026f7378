"""The events of chosen ranks and steps as `RankEvents`: from the run's event store, or from the files of its ranks.

The store has an event's exposed time, and not the spans in which compute waited: a wait is drawn before the end of its
communication.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megascale.core.events import COMPUTE, Event, RankEvents, event_file_name, read_events
from megascale.eventstore.query import StoreError, fetch, open_store
from megascale.eventstore.schema import HOST_AXIS
from megascale.layout.topology import Topology

if TYPE_CHECKING:
    import duckdb

MOST_RANKS = 64
"""Most ranks of a picture."""

PICTURED_RANKS = 8
"""Most ranks of a report's picture."""

MOST_EVENTS = 200_000
"""Most events of a picture."""


def stored_steps(store: duckdb.DuckDBPyConnection, most: int = 200) -> list[int]:
    """Return the newest steps with events, ascending."""
    found = fetch(store, f"SELECT DISTINCT step FROM events WHERE step > 0 ORDER BY step DESC LIMIT {most}")
    return sorted(found["step"].tolist())


def stored_events(
    store: duckdb.DuckDBPyConnection, topology: Topology, ranks: Sequence[int], steps: Sequence[int]
) -> list[RankEvents]:
    """Return the events of ranks and steps in the order of `ranks`, of a step's last attempt; MOST_EVENTS at most."""
    columns = fetch(
        store,
        "SELECT * FROM events WHERE list_contains(?, rank) AND list_contains(?, step) "
        "QUALIFY attempt = max(attempt) OVER (PARTITION BY step) ORDER BY issue_ns LIMIT ?",
        [list(ranks), list(steps), MOST_EVENTS],
    )
    times = {name: columns[name] for name in ("issue_ns", "start_ns", "end_ns")}
    origin = int(min((column.min() for column in times.values() if len(column)), default=0))
    columns |= {name: (column - origin) / 1e9 for name, column in times.items()}
    columns["exposed_s"] = columns["exposed_ns"] / 1e9
    rows = {name: np.asarray(column).tolist() for name, column in columns.items()}
    by_rank: dict[int, list[Event]] = {rank: [] for rank in ranks}
    for at, rank in enumerate(rows["rank"]):
        if rows["axis"][at] != HOST_AXIS:
            by_rank[rank].append(_event(rows, at))
    return [_rank_events(topology, rank, events) for rank, events in by_rank.items() if events]


_AS_STORED = ("axis", "name", "part", "step", "chunk", "microbatch", "sequence", "bytes", "peer", "layer", "stage",
              "direction")  # fmt: skip
"""Fields of an event that the store has under the same name."""


def _event(rows: dict[str, list], at: int) -> Event:
    end, exposed = rows["end_ns"][at], rows["exposed_s"][at]
    fields = {name: rows[name][at] for name in _AS_STORED}
    fields |= {
        "start": rows["start_ns"][at],
        "end": end,
        "issue": rows["issue_ns"][at],
        "group": rows["group_name"][at],
    }
    if exposed > 0 and rows["axis"][at] != COMPUTE:
        fields["waits"] = ((end - exposed, end),)
    return Event(**fields)


def _rank_events(topology: Topology, rank: int, events: list[Event]) -> RankEvents:
    return RankEvents(rank, topology.world_size, topology.coord(rank)._asdict(), "", (), 0, tuple(events))


def filed_steps(folder: Path) -> list[int]:
    """Return the steps in the file of the first rank that has one, ascending."""
    for path in sorted((folder / "events").glob(event_file_name("*"))):
        with contextlib.suppress(OSError, ValueError):
            return sorted({event.step for event in read_events(path).events} - {0})
    return []


def pictured_events(folder: Path, topology: Topology) -> list[RankEvents]:
    """Return the events of a late whole step, of the first ranks of the first pipeline; empty without events."""
    ranks = topology.group(0, "pp")[:PICTURED_RANKS]
    try:
        store = open_store(folder)
    except StoreError:
        found = filed_events(folder, ranks, None)
    else:
        steps = stored_steps(store)[-3:]
        found = stored_events(store, topology, ranks, steps) or filed_events(folder, ranks, None)
    common = set[int].intersection(*({event.step for event in rank.events} for rank in found)) - {0} if found else set()
    step = sorted(common)[-2:][:1]  # the newest may not be whole
    return [replace(rank, events=tuple(event for event in rank.events if event.step in step)) for rank in found]


def filed_events(folder: Path, ranks: Sequence[int], steps: Sequence[int] | None) -> list[RankEvents]:
    """Return the events in the files `events/rank-N.jsonl` of a finished run. `steps`: None for all."""
    found = []
    for rank in ranks:
        with contextlib.suppress(OSError, ValueError):
            events = read_events(folder / "events" / event_file_name(rank))
            kept = tuple(event for event in events.events if steps is None or event.step in steps)
            found.append(replace(events, events=kept))
    return [events for events in found if events.events]
