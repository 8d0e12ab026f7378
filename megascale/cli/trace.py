"""`megascale trace`: the events of a run's ranks as one timeline and a summary, without torch."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megascale.cli.argument_types import own_file, rank_ranges, step_range
from megascale.core.errors import Exit, MegascaleError
from megascale.core.files import exists, is_folder, write_text
from megascale.core.process import exit_on_stop_signals, without_gc
from megascale.operate.show import chrome_trace
from megascale.operate.show.charts import shapes, timeline
from megascale.operate.show.chrome_trace import TraceStats
from megascale.operate.show.summary import AxisCommunication, format_shares, mean_over_ranks, summarize
from megascale.operate.store.query import StoreError
from megascale.operate.store.rank_events import StoredRank, read_rank_events
from megascale.record.events import RankEvents

MAX_TABLE_RANKS = 16
"""Number of ranks above which the table shows means over ranks instead of a row per rank."""

MAX_SVG_RANKS = 8
"""Maximum number of ranks in a picture without --ranks."""

OUTSIDE_STEPS = 0
"""Step number of the events outside steps: incomplete by definition, but --steps may select 0."""


class TraceError(MegascaleError):
    """The run has no events of the requested ranks or steps, or a file cannot be written."""

    exit_status = Exit.CONFIG


@dataclass(frozen=True)
class TraceResult:
    """Files written and summary of a trace."""

    timeline: Path
    svg: Path | None
    ranks: list[int]
    steps: list[int]
    dropped: int
    stats: TraceStats
    shares: list[AxisCommunication]


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    sub.add_argument("folder", metavar="RUN_DIR", type=Path, help="the run's folder")
    steps = "steps A to B, both included, or A alone (default: the steps that are complete on every chosen rank)"
    sub.add_argument("--steps", metavar="A:B", type=step_range, help=steps)
    sub.add_argument("--ranks", metavar="LIST", type=rank_ranges, help="ranks, such as 0,1,4-7 (default: all)")
    output = "the timeline (default: RUN_DIR/timeline.json)"
    sub.add_argument("--output", metavar="FILE.json", type=own_file(".json", chrome_trace.FILE_START), help=output)
    drawn = (
        f"also draw a picture (without --steps: of the last step; without --ranks: of {MAX_SVG_RANKS} ranks at most)"
    )
    sub.add_argument("--svg", metavar="FILE.svg", type=own_file(".svg", shapes.FILE_START), help=drawn)
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    path = options.output or options.folder / "timeline.json"
    with exit_on_stop_signals(), without_gc():
        records = read_ranks(options.folder, options.ranks, options.steps)
        steps = select_steps(records, options.steps, lambda: read_ranks(options.folder, options.ranks, None))
        ranks = [filter_steps(record.events, steps) for record in records]
        with _writing(path):
            stats = chrome_trace.write_trace(path, ranks, chrome_trace.first_start(ranks))
        if options.svg:
            with _writing(options.svg):
                write_text(options.svg, timeline.render_svg(select_for_svg(ranks, options)))
        shares = [share for events in ranks for share in summarize(events)]
    result = TraceResult(
        timeline=path,
        svg=options.svg,
        ranks=[events.rank for events in ranks],
        steps=steps,
        dropped=sum(events.dropped for events in ranks),
        stats=stats,
        shares=shares,
    )
    notes = [*_missing(records, options.ranks), *_skipped(records, steps, options.steps), *_unmatched(stats)]
    print(json.dumps(_as_json(result, notes)) if options.json else _as_text(result, notes))
    return Exit.OK


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}", hint="give another file") from None


def read_ranks(folder: Path, ranks: list[range] | None, steps: range | None) -> list[StoredRank]:
    """Read the events of the requested ranks and steps from the event store: without steps, of the newest.

    Raises: TraceError, also if a requested rank has no events
    """
    if not is_folder(folder):
        problem = "not a folder" if exists(folder) else "no such folder"
        raise TraceError(f"{folder}: {problem}", hint="give a run's folder: observe.dir/name of its configuration")
    try:
        stored = read_rank_events(folder, lambda rank: ranks is None or any(rank in span for span in ranks), steps)
        known = [rank.events.rank for rank in stored]
        absent = next((rank for span in ranks or () for rank in span if rank not in known), None)
        if absent is not None:
            known = [rank.events.rank for rank in read_rank_events(folder, lambda rank: True, range(0))]
    except StoreError:
        stored, absent, known = [], None, []
    if not known:
        hint = "ranks write events into the run's event store, unless observe.events or observe.store is off"
        raise TraceError(f"{folder}: no events of any rank", hint=hint)
    if absent is not None:
        raise TraceError(f"--ranks: rank {absent} has no events", hint=f"choose among {_format_spans('rank', known)}")
    return stored


def select_steps(
    records: Sequence[StoredRank], requested: range | None, newest: Callable[[], Sequence[StoredRank]]
) -> list[int]:
    """List the requested steps with events on any rank; without a request, the steps complete on every rank. `newest`:
    reads the newest steps, to offer them.

    Raises: TraceError if there is no such step.
    """
    recorded = frozenset[int]().union(*(record.steps for record in records))
    if requested is None:
        steps = recorded.intersection(*(record.complete_steps for record in records))
        message = "no step is complete on every chosen rank"
    else:
        steps = frozenset(step for step in recorded if step in requested)
        message = f"--steps {requested[0]}:{requested[-1]}: no chosen rank has events of these steps"
    if not steps:
        recorded = frozenset[int]().union(*(record.steps for record in (records if requested is None else newest())))
        hint = f"choose --steps among {_format_spans('step', recorded)}" if recorded else "the run took no steps"
        raise TraceError(message, hint=hint)
    return sorted(steps)


def filter_steps(events: RankEvents, steps: Container[int]) -> RankEvents:
    """Keep the events of some steps."""
    return replace(events, events=tuple(event for event in events.events if event.step in steps))


def select_for_svg(ranks: Sequence[RankEvents], options: argparse.Namespace) -> list[RankEvents]:
    """Select the ranks and steps of the picture: few, to keep the picture legible, unless the user chose."""
    if options.ranks is None:
        ranks = ranks[:MAX_SVG_RANKS]
    if options.steps is None:
        last = max(event.step for events in ranks for event in events.events)
        ranks = [filter_steps(events, {last}) for events in ranks]
    return list(ranks)


def _missing(records: Sequence[StoredRank], requested: list[range] | None) -> Iterator[str]:
    world = records[0].events.world
    absent = set(range(world)) - {record.events.rank for record in records}
    if absent and requested is None:
        yield f"{_format_spans('rank', absent)} of {world} have no events"


def _skipped(records: Sequence[StoredRank], steps: Sequence[int], requested: range | None) -> Iterator[str]:
    lossy = [record.events for record in records if record.events.dropped]
    if lossy:
        count = sum(events.dropped for events in lossy)
        ranks = _format_spans("rank", (events.rank for events in lossy))
        yield f"{count:,} events were dropped on {ranks}: overwritten before they were stored"
    recorded = frozenset[int]().union(*(record.steps for record in records))
    complete = recorded.intersection(*(record.complete_steps for record in records))
    if requested is None and (partial := recorded - complete - {OUTSIDE_STEPS}):
        yield f"{_format_spans('step', partial)} left out: not complete on every chosen rank"
    elif partial := frozenset(steps) - complete - {OUTSIDE_STEPS}:
        yield f"{_format_spans('step', partial)} shown, but not complete on every chosen rank"


def _unmatched(stats: TraceStats) -> Iterator[str]:
    if stats.single:
        yield f"{stats.single:,} messages without an arrow: only one side was recorded"
    if stats.reversed:
        yield f"{stats.reversed:,} messages without an arrow: the clocks say that they arrived before they were sent"


def _format_spans(noun: str, numbers: Iterable[int]) -> str:
    """Format numbers as 'rank 3' or 'steps 1-4, 7'."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    single = len(spans) == len(spans[0]) == 1
    return f"{noun}{'' if single else 's'} " + ", ".join("-".join(map(str, span)) for span in spans)


def _as_json(result: TraceResult, notes: list[str]) -> dict[str, Any]:
    return {
        "timeline": str(result.timeline),
        "svg": result.svg and str(result.svg),
        "ranks": result.ranks,
        "steps": result.steps,
        **asdict(result.stats),
        "dropped": result.dropped,
        "notes": notes,
        "per_step": [share.as_json() for share in result.shares],
    }


def _as_text(result: TraceResult, notes: list[str]) -> str:
    selection = f"{_format_spans('step', result.steps)} of {_format_spans('rank', result.ranks)}"
    averaged = len(result.ranks) > MAX_TABLE_RANKS
    return "\n".join(
        [
            f"{result.timeline}: {selection}, {result.stats.slices:,} slices, {result.stats.arrows:,} arrows",
            "open it at https://ui.perfetto.dev (nothing is uploaded) or in chrome://tracing",
            *([f"{result.svg}: the picture"] if result.svg else []),
            "",
            f"means per step{f' and rank; --ranks of at most {MAX_TABLE_RANKS} for single ranks' if averaged else ''}:",
            format_shares(mean_over_ranks(result.shares) if averaged else result.shares),
            *(["", *notes] if notes else []),
        ]
    )
