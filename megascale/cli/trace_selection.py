"""The ranks and steps of `megascale trace`: those that the user has chosen, or those whose events are complete."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megascale.core.files import is_folder
from megascale.core.named_run import no_run
from megascale.operate.show.chrome_trace import TraceStats
from megascale.operate.store.query import StoreError
from megascale.operate.store.rank_events import StoredRank, read_rank_events
from megascale.record.events import RankEvents

OUTSIDE_STEPS = 0  # step number of the events outside steps: incomplete by definition, but --steps may select 0


def read_ranks(folder: Path, ranks: list[range] | None, steps: range | None) -> list[StoredRank]:
    """Read the events of the requested ranks and steps from the event store: without steps, of the newest.

    Raises: RunFolderError; StoreError, also if a requested rank has no events
    """
    if not is_folder(folder):
        raise no_run(folder)
    try:
        stored = read_rank_events(folder, lambda rank: ranks is None or any(rank in span for span in ranks), steps)
        known = [rank.events.rank for rank in stored]
        absent = next((rank for span in ranks or () for rank in span if rank not in known), None)
        if absent is not None:
            known = [rank.events.rank for rank in read_rank_events(folder, lambda rank: True, range(0))]
    except StoreError:
        stored, absent, known = [], None, []
    if not known:
        hint = (
            "ranks write events into the run's event store, unless observe.store_events or observe.event_store is off"
        )
        raise StoreError(f"{folder}: no events of any rank", hint=hint)
    if absent is not None:
        raise StoreError(f"--ranks: rank {absent} has no events", hint=f"choose among {format_spans('rank', known)}")
    return stored


def select_steps(
    records: Sequence[StoredRank], requested: range | None, newest: Callable[[], Sequence[StoredRank]]
) -> list[int]:
    """List the requested steps with events on any rank; without a request, the steps complete on every rank. `newest`:
    reads the newest steps, to offer them.

    Raises: StoreError if there is no such step.
    """
    recorded = frozenset[int]().union(*(record.steps for record in records))
    if requested is None:
        steps = recorded.intersection(*(record.complete_steps for record in records))
        message = "no step is complete on every chosen rank"
    else:
        steps = frozenset(step for step in recorded if step in requested)
        message = f"--steps {requested[0]}:{requested[-1]}: "
        message += "no chosen rank has events of these steps in the last attempt"
    if not steps:
        recorded = frozenset[int]().union(*(record.steps for record in (records if requested is None else newest())))
        hint = f"choose --steps among {format_spans('step', recorded)}" if recorded else "the run took no steps"
        raise StoreError(message, hint=hint)
    return sorted(steps)


def filter_steps(events: RankEvents, steps: Container[int]) -> RankEvents:
    """Keep the events of some steps."""
    return replace(events, events=tuple(event for event in events.events if event.step in steps))


def missing_parts(
    records: Sequence[StoredRank], steps: Sequence[int], stats: TraceStats, options: argparse.Namespace
) -> Iterator[str]:
    """Yield what a timeline lacks: ranks, events, steps or parts of them, and arrows."""
    world = records[0].events.world
    absent = set(range(world)) - {record.events.rank for record in records}
    if absent and options.ranks is None:
        yield f"{format_spans('rank', absent)} of {world} have no events"
    if lossy := [record.events for record in records if record.events.dropped]:
        count = sum(events.dropped for events in lossy)
        ranks = format_spans("rank", (events.rank for events in lossy))
        yield f"{count:,} events were dropped on {ranks}: overwritten before they were stored"
    recorded = frozenset[int]().union(*(record.steps for record in records))
    complete = recorded.intersection(*(record.complete_steps for record in records))
    if options.steps is None and (partial := recorded - complete - {OUTSIDE_STEPS}):
        yield f"{format_spans('step', partial)} left out: not complete on every chosen rank"
    elif partial := frozenset(steps) - complete - {OUTSIDE_STEPS}:
        yield f"{format_spans('step', partial)} shown, but not complete on every chosen rank"
    if stats.single:
        yield f"{stats.single:,} messages without an arrow: only one side was recorded"
    if stats.reversed:
        yield f"{stats.reversed:,} messages without an arrow: seen to arrive before they were sent"


def format_spans(noun: str, numbers: Iterable[int]) -> str:
    """Format numbers as 'rank 3' or 'steps 1-4, 7'."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    single = len(spans) == len(spans[0]) == 1
    return f"{noun}{'' if single else 's'} " + ", ".join("-".join(map(str, span)) for span in spans)
