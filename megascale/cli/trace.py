"""`megascale trace`: what the ranks of a run wrote down, as one timeline and a summary. It never imports torch."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megascale.core.errors import Exit, MegascaleError
from megascale.core.events import COMPUTE, RankEvents, file_name, read_events
from megascale.core.process import stopped_in_order, without_collection
from megascale.observe import picture, timeline
from megascale.observe.summary import Share, over_ranks, summarize, table
from megascale.observe.timeline import Written

MANY = 16
"""Ranks beyond which the table has means over them instead of a row for each."""

PICTURED = 8
"""Ranks in a picture, where none are chosen."""


START = {".json": timeline.START, ".svg": picture.START}
"""What files of each kind begin with."""

BEFORE = 0
"""The step of what lies outside of steps: none, but it can be asked for."""


class TraceError(MegascaleError):
    """Records that are not there, cannot be read, or do not have what was asked for."""

    exit_status = Exit.CONFIG


@dataclass(frozen=True)
class Record:
    """A rank's file. `steps`: those that it has events of; `whole`: those of which it has all. `events` has only those
    that were asked for.
    """

    events: RankEvents
    steps: frozenset[int]
    whole: frozenset[int]


@dataclass(frozen=True)
class Result:
    """What was written and found."""

    timeline: Path
    svg: Path | None
    ranks: list[int]
    steps: list[int]
    dropped: int
    written: Written
    shares: list[Share]


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    sub.add_argument("folder", metavar="RUN_DIR", type=Path, help="a run's folder")
    steps = "from step A to step B, both included, or A alone (default: those that every chosen rank has whole)"
    sub.add_argument("--steps", metavar="A:B", type=_steps, help=steps)
    sub.add_argument("--ranks", metavar="LIST", type=_ranks, help="such as 0,1,4-7 (default: all)")
    output = "the timeline (default: RUN_DIR/timeline.json)"
    sub.add_argument("--output", metavar="FILE.json", type=_file(".json"), help=output)
    drawn = f"draw it too (without --steps: the last of them; without --ranks: {PICTURED} ranks at most)"
    sub.add_argument("--svg", metavar="FILE.svg", type=_file(".svg"), help=drawn)
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def _file(suffix: str) -> Callable[[str], Path]:
    """A file to be written. It replaces nothing but what this command has written before."""

    def path(text: str) -> Path:
        if not text.endswith(suffix):
            raise argparse.ArgumentTypeError(f"{text!r} does not end in {suffix}")
        found = Path(text)
        if found.is_file():
            with open(found, "rb") as file:
                start = file.read(len(START[suffix]))
            if start and start != START[suffix]:
                raise argparse.ArgumentTypeError(f"{text!r} exists and was not written by this command")
        return found

    return path


def _steps(text: str) -> range:
    if (found := _span(text, ":")) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps: A:B with A not above B, or A alone")
    return found


def _ranks(text: str) -> list[range]:
    found = [_span(word, "-") for word in text.split(",")]
    if None in found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks such as 0,1,4-7")
    return [span for span in found if span is not None]


def _span(text: str, sign: str) -> range | None:
    """From a number to another, both included; one number alone is a span too."""
    first, _, last = text.partition(sign)
    if not re.fullmatch(rf"\d+({sign}\d+)?", text, re.ASCII) or int(last or first) < int(first):
        return None
    return range(int(first), int(last or first) + 1)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    path = options.output or options.folder / "timeline.json"
    with stopped_in_order(), without_collection():
        files = chosen(rank_files(options.folder), options.ranks)
        records = [read(file, options.steps) for file in files]
        check_one_job(records, options.folder)
        steps = shown(records, options.steps)
        ranks = [only(record.events, steps) for record in records]
        origin = min(time for events in ranks for time in timeline.begins(events).values())
        with _writing(path):
            written = timeline.write(path, (timeline.part(events, origin) for events in ranks))
        if options.svg:
            with _writing(options.svg):
                picture.write(options.svg, pictured(ranks, options))
        shares = [share for events in ranks for share in summarize(events)]
    result = Result(
        timeline=path,
        svg=options.svg,
        ranks=[events.rank for events in ranks],
        steps=steps,
        dropped=sum(events.dropped for events in ranks),
        written=written,
        shares=shares,
    )
    notes = [*_missing(records, options.ranks), *_skipped(records, steps, options.steps), *_unmatched(written)]
    print(json.dumps(_as_json(result, notes)) if options.json else _as_text(result, notes))
    return Exit.OK


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}", mend="give another file") from None


def rank_files(folder: Path) -> dict[int, Path]:
    """The file of each rank that has one, in the order of ranks.

    Raises: TraceError if there are none.
    """
    mend = "a run writes them when it ends, if its configuration has observe.ledger and observe.events"
    if not folder.is_dir():
        problem = "is no folder" if folder.exists() else "no such folder"
        raise TraceError(
            f"{folder}: {problem}", mend="give a run's folder, which is observe.dir/name of its configuration"
        )
    records = folder / "events"
    if not records.is_dir():
        raise TraceError(f"{records}: no such folder, so there are no records of this run", mend=mend)
    numbers = ((path, path.stem.removeprefix("rank-")) for path in records.glob(file_name("*")))
    found = {int(number): path for path, number in numbers if number.isdecimal()}
    if not found:
        raise TraceError(f"{records}: no rank's file, as {file_name(0)}, is here", mend=mend)
    return dict(sorted(found.items()))


def chosen(files: dict[int, Path], wanted: list[range] | None) -> list[Path]:
    """The files of the ranks that are wanted, or all.

    Raises: TraceError if one of them has none.
    """
    if wanted is None:
        return list(files.values())
    absent = next((rank for span in wanted for rank in span if rank not in files), None)
    if absent is not None:
        what = f"--ranks: rank {absent} has no file in {next(iter(files.values())).parent}"
        raise TraceError(what, mend=f"there are those of {_spans('rank', files)}")
    return [path for rank, path in files.items() if any(rank in span for span in wanted)]


def read(path: Path, wanted: range | None) -> Record:
    """Read a rank's file and keep the events of the steps that are wanted, or all.

    Raises: TraceError if it cannot be read.
    """
    try:
        events = read_events(path)
    except OSError as error:
        mend = "see its permissions" if isinstance(error, PermissionError) else "a run writes it anew when it ends"
        raise TraceError(f"{path}: cannot be read: {error.strerror}", mend=mend) from None
    except ValueError as error:
        raise TraceError(f"{path}: {error}", mend="the file is spoilt: leave out its rank with --ranks") from None
    if file_name(events.rank) != path.name:
        raise TraceError(f"{path}: has the events of rank {events.rank}", mend="give the file its name again")
    steps = sorted({event.step for event in events.events})
    updates = Counter(event.step for event in events.events if event.axis == COMPUTE and event.name == "update")
    most = max(updates.values(), default=0)  # one for each bucket: a step that diverges makes the first
    whole = {step for step, count in updates.items() if count == most}
    if events.dropped and events.events:
        whole.discard(events.events[0].step)  # the oldest that is left has lost its first events
    kept = events if wanted is None else only(events, wanted)
    return Record(kept, frozenset(steps), frozenset(whole - {BEFORE}))


def check_one_job(records: Sequence[Record], folder: Path) -> None:
    """Raises: TraceError if the files are of jobs of different sizes."""
    first, *others = (record.events for record in records)
    for other in others:
        if other.world != first.world:
            ranks = f"rank {first.rank} of {first.world}, rank {other.rank} of {other.world}"
            raise TraceError(f"{folder}: files of two jobs: {ranks}", mend="choose those of one with --ranks")


def shown(records: Sequence[Record], wanted: range | None) -> list[int]:
    """The steps that some record has of those that are wanted; if no wish is given, those that all have whole.

    Raises: TraceError if there are none.
    """
    there = frozenset[int]().union(*(record.steps for record in records))
    if wanted is None:
        steps = there.intersection(*(record.whole for record in records))
        what = "no step is whole on every chosen rank"
    else:
        steps = frozenset(step for step in there if step in wanted)
        what = f"--steps {wanted[0]}:{wanted[-1]}: no chosen rank has events of these"
    if not steps:
        has = f"with --steps choose among {_spans('step', there)}" if there else "the files are of a run without steps"
        raise TraceError(what, mend=has)
    return sorted(steps)


def only(events: RankEvents, steps: Container[int]) -> RankEvents:
    """The events of some steps."""
    return replace(events, events=tuple(event for event in events.events if event.step in steps))


def pictured(ranks: Sequence[RankEvents], options: argparse.Namespace) -> list[RankEvents]:
    """What is drawn: a picture of many steps or ranks would show nothing, unless they were asked for."""
    if options.ranks is None:
        ranks = ranks[:PICTURED]
    if options.steps is None:
        last = max(event.step for events in ranks for event in events.events)
        ranks = [only(events, {last}) for events in ranks]
    return list(ranks)


def _missing(records: Sequence[Record], wanted: list[range] | None) -> Iterator[str]:
    world = records[0].events.world
    absent = set(range(world)) - {record.events.rank for record in records}
    if absent and wanted is None:
        yield f"{_spans('rank', absent)} of {world} left no file"


def _skipped(records: Sequence[Record], steps: Sequence[int], wanted: range | None) -> Iterator[str]:
    lossy = [record.events for record in records if record.events.dropped]
    if lossy:
        count = sum(events.dropped for events in lossy)
        yield f"{count:,} events that found no more room were dropped on {_spans('rank', (e.rank for e in lossy))}"
    there = frozenset[int]().union(*(record.steps for record in records))
    whole = there.intersection(*(record.whole for record in records))
    if wanted is None and (partial := there - whole - {BEFORE}):
        yield f"{_spans('step', partial)} left out: not whole on every chosen rank"
    elif partial := frozenset(steps) - whole - {BEFORE}:
        yield f"{_spans('step', partial)} shown, but not whole on every chosen rank"


def _unmatched(written: Written) -> Iterator[str]:
    if written.single:
        yield f"{written.single:,} messages without an arrow: only one side of them was recorded"
    if written.reversed:
        yield f"{written.reversed:,} messages without an arrow: as far as is known they arrived before they were sent"


def _spans(noun: str, numbers: Iterable[int]) -> str:
    """As 'rank 3' or 'steps 1-4, 7'."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    single = len(spans) == len(spans[0]) == 1
    return f"{noun}{'' if single else 's'} " + ", ".join("-".join(map(str, span)) for span in spans)


def _as_json(result: Result, notes: list[str]) -> dict[str, Any]:
    return {
        "timeline": str(result.timeline),
        "svg": result.svg and str(result.svg),
        "ranks": result.ranks,
        "steps": result.steps,
        **asdict(result.written),
        "dropped": result.dropped,
        "notes": notes,
        "per_step": [share.as_json() for share in result.shares],
    }


def _as_text(result: Result, notes: list[str]) -> str:
    what = f"{_spans('step', result.steps)} of {_spans('rank', result.ranks)}"
    many = len(result.ranks) > MANY
    return "\n".join(
        [
            f"{result.timeline}: {what}, {result.written.slices:,} slices, {result.written.arrows:,} arrows",
            "open it at https://ui.perfetto.dev (it is not sent anywhere) or in chrome://tracing",
            *([f"{result.svg}: the picture"] if result.svg else []),
            "",
            f"means per step{f' and rank; --ranks with at most {MANY} shows each' if many else ''}:",
            table(over_ranks(result.shares) if many else result.shares),
            *(["", *notes] if notes else []),
        ]
    )
