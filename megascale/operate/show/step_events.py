"""The events of chosen ranks and steps, from the run's event store."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from megascale.layout.topology import Topology
from megascale.operate.store.query import StoreError, fetch
from megascale.operate.store.rank_events import read_rank_events
from megascale.operate.store.reading import read_store
from megascale.operate.store.schema import has_rare_tag
from megascale.record.events import RankEvents

OFFERED_STEPS = 200  # steps from which a user may choose: the newest

_LAST = "attempt = (SELECT max(attempt) FROM ranks)"

PICTURED_RANKS = 8  # most ranks of a report's picture


def steps_with_events(folder: Path) -> list[int]:
    """Return the last attempt's newest steps of which single events are kept, ascending."""
    with contextlib.suppress(StoreError):
        newest = f"SELECT DISTINCT step FROM events WHERE step > 0 AND {_LAST} ORDER BY step DESC LIMIT {OFFERED_STEPS}"
        reading = read_store(folder, lambda store: fetch(store, newest)["step"].tolist(), tables=("events", "ranks"))
        if reading.value:
            return sorted(reading.value)
    return []


def opening_step(folder: Path, steps: Sequence[int]) -> int | None:
    """Return the step that a timeline opens on: of `steps_with_events` the newest that all ranks have ended and whose
    time no save, evaluation or garbage collection has made longer, or none that is rare; else the newest but one.
    """
    with contextlib.suppress(StoreError):
        ordinary = f"""
            SELECT step, bool_or(tags <> '') AS tagged FROM steps WHERE {_LAST} GROUP BY step
            HAVING NOT bool_or({has_rare_tag()})
                AND count(DISTINCT rank) = (SELECT count(DISTINCT rank) FROM ranks WHERE {_LAST})"""
        found = read_store(folder, lambda store: fetch(store, ordinary), tables=("steps", "ranks")).value
        by_tags = {int(step): tagged for step, tagged in zip(found["step"], found["tagged"], strict=True)}
        if offered := by_tags.keys() & steps:
            return min(offered, key=lambda step: (by_tags[step], -step))
    return next(iter(steps[-2:]), None)  # the newest may not be whole


def events_of(folder: Path, ranks: Sequence[int], steps: range) -> list[RankEvents]:
    """Return the events of ranks in steps, in the order of `ranks`, without ranks that have none."""
    with contextlib.suppress(StoreError):
        found = {
            stored.events.rank: stored.events for stored in read_rank_events(folder, set(ranks).__contains__, steps)
        }
        return [found[rank] for rank in ranks if rank in found and found[rank].events]
    return []


def pictured_events(folder: Path, topology: Topology) -> list[RankEvents]:
    """Return the events of a late step, of the first ranks of the first pipeline; empty without events."""
    step = opening_step(folder, steps_with_events(folder))
    return [] if step is None else events_of(folder, topology.group(0, "pp")[:PICTURED_RANKS], range(step, step + 1))
