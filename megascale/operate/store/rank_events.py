"""The events of ranks from an event store, as values: for timelines of runs that go on, have ended, or were killed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.layout.topology import AXES
from megascale.operate.store.reading import read_store
from megascale.record.events import COMPUTE, HOST_AXIS, Event, RankEvents, follow_channels, single_wait

if TYPE_CHECKING:
    import duckdb

NEWEST_EVENTS = 1 << 15  # most events of a rank that are read unless steps are asked for: of the newest whole steps
NEWEST_STEPS = 2000  # most steps that are read unless others are asked for

_SAME = (
    "axis", "name", "part", "step", "chunk", "microbatch", "sequence", "bytes", "peer", "layer", "stage", "direction",
)  # fmt: skip


@dataclass(frozen=True)
class StoredRank:
    """The events of a rank, in the order of issue, and the steps that its node has stored as a whole."""

    events: RankEvents
    complete_steps: frozenset[int]

    @property
    def steps(self) -> frozenset[int]:
        """The steps with any events."""
        return frozenset(event.step for event in self.events.events)


def read_rank_events(run: Path, wanted: Callable[[int], bool], steps: range | None) -> list[StoredRank]:
    """Read the newest attempt's events of the wanted ranks in `steps`, by default in the newest. Times are seconds on
    one clock. The store has only the sum of the waits for a communication: here it is one wait until its end.

    Raises: StoreError
    """
    return read_store(run, lambda store: _read(store, wanted, steps), tables=("ranks", "steps", "events")).value


def _read(store: duckdb.DuckDBPyConnection, wanted: Callable[[int], bool], steps: range | None) -> list[StoredRank]:
    [(attempt,)] = store.execute("SELECT coalesce(max(attempt), -1) FROM ranks").fetchall()
    known = f"SELECT rank, world, host, {', '.join(AXES)} FROM ranks WHERE attempt = ? ORDER BY rank"
    ranks = [row for row in store.execute(known, [attempt]).fetchall() if wanted(row[0])]
    chosen = _newest_steps(store, attempt, ranks[0][0] if ranks else 0) if steps is None else steps
    where = "WHERE attempt = ? AND step >= ? AND step < ? AND rank IN (SELECT unnest(?))"
    given = [attempt, chosen.start, chosen.stop, [rank for rank, *_ in ranks]]
    complete: defaultdict[int, set[int]] = defaultdict(set)
    events: defaultdict[int, list[Event]] = defaultdict(list)
    lost: defaultdict[int, int] = defaultdict(int)
    for rank, step, count in store.execute(f"SELECT rank, step, events_lost FROM steps {where}", given).fetchall():
        complete[rank].add(step)
        lost[rank] += count
    columns = ", ".join((*_SAME, "group_name", "start_ns", "end_ns", "issue_ns", "exposed_ns"))
    rows = f"SELECT rank, {columns} FROM events {where} AND axis <> '{HOST_AXIS}' ORDER BY rank, issue_ns"
    found = store.execute(rows, given).fetchall()
    origin = min((row[-2] for row in found), default=0)
    for rank, *same, group, start_ns, end_ns, issue_ns, exposed_ns in found:
        start, end, issue = ((at - origin) / 1e9 for at in (start_ns, end_ns, issue_ns))
        fields: dict[str, Any] = dict(zip(_SAME, same, strict=True))
        if fields["axis"] != COMPUTE:
            fields |= {"group": group, "issue": issue, "waits": single_wait(issue, end, exposed_ns / 1e9)}
        events[rank].append(Event(**fields, start=start, end=end))
    return [
        StoredRank(
            RankEvents(
                rank, world, dict(zip(AXES, coords, strict=True)), host, (), lost[rank],
                tuple(follow_channels(events[rank])),
            ), frozenset(complete[rank]),
        ) for rank, world, host, *coords in ranks
    ]  # fmt: skip


def _newest_steps(store: duckdb.DuckDBPyConnection, attempt: int, rank: int) -> range:
    """Return the newest steps of which a rank has at most NEWEST_EVENTS together, or the newest one."""
    [(newest,)] = store.execute("SELECT coalesce(max(step), 0) FROM steps WHERE attempt = ?", [attempt]).fetchall()
    first, events = newest, 0
    counts = f"""
        SELECT step, count(*) FROM events WHERE attempt = ? AND rank = ? AND step BETWEEN ? AND ?
        AND axis <> '{HOST_AXIS}' GROUP BY step ORDER BY step DESC"""
    for step, count in store.execute(counts, [attempt, rank, max(1, newest - NEWEST_STEPS + 1), newest]).fetchall():
        events += count
        if events > NEWEST_EVENTS:
            break
        first = step
    return range(first, newest + 1)
