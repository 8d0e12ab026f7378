"""Rows of a store's tables for tests: every column has a value."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from megascale.core.storage import Location
from megascale.operate.store.schema import TABLES
from megascale.operate.store.table_files import TableFile, write_rows
from megascale.record.events import RankEvents


def rows(table: str, number: int = 1, /, **columns: Any) -> dict[str, list[Any]]:
    """Return `number` rows of a table. `columns`: a value for all rows, or a list; other numbers are 0, texts empty."""
    defaults = {column.name: "" if column.type == "text" else 0 for column in TABLES[table]}
    return {
        name: value if isinstance(value, list) else [value] * number for name, value in {**defaults, **columns}.items()
    }


def store_run(folder: Path, ranks: Sequence[RankEvents], incomplete: Collection[int] = (), attempt: int = 0) -> Path:
    """Write a run's event store with these events of an attempt, and return the run's folder. Steps but the
    `incomplete` have ended; dropped events are told with the first.
    """
    store = Location(str(folder / "events"))
    for events in ranks:
        columns: dict[str, list[Any]] = {column.name: [] for column in TABLES["events"]}
        for event in events.events:
            times = {f"{name}_ns": round(getattr(event, name) * 1e9) for name in ("start", "end", "issue", "exposed")}
            times["issue_ns"] = times["issue_ns"] or times["start_ns"]
            other = {"attempt": attempt, "rank": events.rank, "group_name": event.group, **times}
            for name, column in columns.items():
                column.append(other[name] if name in other else getattr(event, name))
        node, steps = f"node-{events.rank}", sorted({event.step for event in events.events} - set(incomplete))
        lost = [events.dropped, *[0] * len(steps)][: len(steps)]
        told = rows("steps", len(steps), attempt=attempt, rank=events.rank, step=steps, events_lost=lost)
        who = {"attempt": attempt, "rank": events.rank, "world": events.world, "node": node, **events.coord}
        write_rows(store, TableFile("events", node, attempt, 1, 2), columns)
        write_rows(store, TableFile("steps", node, attempt, 1, 2), told)
        write_rows(store, TableFile("ranks", node, attempt, 1, 2), rows("ranks", **who))
    return folder
