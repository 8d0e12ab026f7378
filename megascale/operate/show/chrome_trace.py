"""The merged timeline of a run's ranks, in the Chrome trace format, for ui.perfetto.dev.

A rank is a process with a row for compute and rows for every axis of communication, all on the clock of rank 0. Arrows
lead from the send of a point-to-point message to its receive.

rank_rows: the rows of a rank (Row, Slice). write_trace: the file (TraceStats).
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megascale.core.files import atomic_file
from megascale.record.events import COMPUTE, Event, RankEvents

FILE_START = b'{"displayTimeUnit":"ms","traceEvents":['  # the first bytes of a timeline file

TICKS_PER_SECOND = 8_000_000
"""Ticks in a second. Viewers drop slices that overlap by a rounding error; an eighth of a microsecond is exact in the
binary floats of all viewers.
"""

AXIS_ORDER = ("tp", "cp", "ep", "pp", "dp", "edp", "tied", "world")  # axes in display order; any further axes follow


def axis_sort_key(axis: str) -> tuple[int, str]:
    """The key that sorts axes in display order."""
    return (AXIS_ORDER.index(axis) if axis in AXIS_ORDER else len(AXIS_ORDER), axis)


class Slice(NamedTuple):
    """A span on a row, in ticks: an event, or, if `wait`, a span in which compute waits for the event."""

    start: int
    end: int
    event: Event
    wait: bool = False

    @property
    def name(self) -> str:
        """The displayed name: 'F m3 c0', 'dp.reduce_scatter chunk 1' or 'wait dp.reduce_scatter chunk 1'."""
        event = self.event
        if event.axis == COMPUTE:
            microbatch = f" m{event.microbatch}" if event.microbatch >= 0 else ""
            return f"{event.name}{microbatch}{f' c{event.chunk}' if event.chunk >= 0 else ''}"
        return f"{'wait ' if self.wait else ''}{event.axis}.{event.name} {event.label}".rstrip()


@dataclass(frozen=True)
class Row:
    """A row of slices, sorted by start. Two slices are disjoint or nested."""

    name: str
    slices: list[Slice]


def rank_label(events: RankEvents) -> str:
    """The coordinates of a rank, as 'pp 1, dp 0, tp 1', with those along cp beyond the first."""
    axes = ("pp", "dp", "cp", "tp") if events.coord.get("cp") else ("pp", "dp", "tp")
    return ", ".join(f"{axis} {events.coord[axis]}" for axis in axes if axis in events.coord)


def step_starts(events: RankEvents) -> dict[int, float]:
    """The start of every step's first event or wait, in seconds of rank 0's clock."""
    starts: dict[int, float] = {}
    for event in events.events:
        first = min(itertools.chain([event.start], (start for start, _ in event.waits)))
        starts[event.step] = min(first, starts.get(event.step, first))
    return {step: start + events.clock_offset(start) for step, start in starts.items()}


def first_start(ranks: Iterable[RankEvents]) -> float:
    """Return the start of the first event of some ranks, in seconds of rank 0's clock; 0 without events."""
    return min((start for events in ranks for start in step_starts(events).values()), default=0.0)


def rank_rows(events: RankEvents, origin: float) -> list[Row]:
    """The rows of a rank: compute with its waits, then communication. `origin`: seconds of rank 0's clock at tick 0.

    Every time is shifted by the clock offset at that time, which preserves order and nesting.
    """

    def tick(time: float) -> int:
        return round((time + events.clock_offset(time) - origin) * TICKS_PER_SECOND)

    compute: list[Slice] = []
    axes: defaultdict[str, list[Slice]] = defaultdict(list)
    for event in events.events:
        row = compute if event.axis == COMPUTE else axes[event.axis]
        start = tick(event.start)
        row.append(Slice(start, max(start, tick(event.end)), event))  # timestamps of a GPU resolve 0.5 us only
        waits = (Slice(tick(start), tick(end), event, wait=True) for start, end in event.waits)
        compute += [wait for wait in waits if wait.end > wait.start]
    rows_of_rank = [Row(COMPUTE, nest_slices(compute))]
    for axis in sorted(axes, key=axis_sort_key):
        for number, lane in enumerate(assign_lanes(axes[axis]), 1):
            rows_of_rank.append(Row(axis if number == 1 else f"{axis} {number}", lane))
    return rows_of_rank


def nest_slices(slices: Iterable[Slice]) -> list[Slice]:
    """Sort slices by start, longest first, and split a slice at the end of the slice in which it begins.

    slices      |----------|          nested      |----------|
                    |-----------|                     |------|----|
    """
    queue = [(slice.start, -slice.end, slice.wait, number, slice) for number, slice in enumerate(slices)]
    heapq.heapify(queue)
    result: list[Slice] = []
    ends: list[int] = []  # ends of the open slices, innermost last
    while queue:
        start, end, wait, number, slice = heapq.heappop(queue)
        while ends and ends[-1] <= start:
            ends.pop()
        if ends and ends[-1] < -end:
            remainder = slice._replace(start=ends[-1])
            heapq.heappush(queue, (remainder.start, end, wait, number, remainder))
            slice = slice._replace(end=ends[-1])
        ends.append(slice.end)
        result.append(slice)
    return result


def assign_lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Assign slices to the fewest lanes without overlaps: a slice goes to the first free lane."""
    result: list[list[Slice]] = []
    for slice in sorted(slices, key=lambda slice: (slice.start, slice.end)):
        free = next((lane for lane in result if lane[-1].end <= slice.start), None)
        if free is None:
            result.append([slice])
        else:
            free.append(slice)
    return result


class MessageEnd(NamedTuple):
    """The slice of a message's send or receive, on a row of its rank. Both ends have the same key: sender, receiver,
    group, step, direction, stage and micro-batch.
    """

    key: tuple[int, int, str, int, str, int, int]
    is_receive: bool
    start: int
    end: int
    rank: int
    row: int


def _rank_items(events: RankEvents, rows_of_rank: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the names of a rank and of its rows, then the slices."""
    rank = events.rank
    named: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"rank {rank} ({rank_label(events)})"}),
        ("process_labels", 0, {"labels": events.host}),
        ("process_sort_index", 0, {"sort_index": rank}),
    ]
    for number, row in enumerate(rows_of_rank):
        named.append(("thread_name", number, {"name": row.name}))
        named.append(("thread_sort_index", number, {"sort_index": number}))
    for name, number, args in named:
        yield {"ph": "M", "name": name, "pid": rank, "tid": _thread(rank, number), "args": args}
    for number, row in enumerate(rows_of_rank):
        for slice in row.slices:
            yield {
                "ph": "X", "name": slice.name, "cat": "wait" if slice.wait else slice.event.axis, "pid": rank,
                "tid": _thread(rank, number), "ts": _microseconds(slice.start),
                "dur": _microseconds(slice.end - slice.start), "args": _details(slice),
            }  # fmt: skip


@dataclass(frozen=True)
class TraceStats:
    """Counts of a timeline file. Two kinds of messages have no arrow: `single` were recorded on a single side;
    `reversed` arrived before their send began, because the clocks of two ranks differ, or a thread was late to notice
    the end of the previous message.
    """

    slices: int
    arrows: int
    single: int
    reversed: int


def write_trace(path: Path, ranks: Iterable[RankEvents], origin: float) -> TraceStats:
    """Write the timeline of ranks atomically. `origin`: seconds of rank 0's clock at its start.

    Raises: OSError
    """
    slices, ends, written = 0, list[MessageEnd](), set[int]()
    with atomic_file(path, "w") as file:
        file.write(FILE_START.decode())
        for events in ranks:
            rows_of_rank = rank_rows(events, origin)
            file.write((",\n" if written else "\n") + _json_items(_rank_items(events, rows_of_rank)))
            slices += sum(len(row.slices) for row in rows_of_rank)
            ends += _message_ends(events.rank, rows_of_rank)
            written.add(events.rank)
        messages = _match_messages(end for end in ends if written.issuperset(end.key[:2]))
        arrows = [(send, receive) for send, receive in messages if send and receive and send.start <= receive.end]
        # arrows follow all slices: a viewer attaches the end of an arrow to the slice that is open at that time
        for number, (send, receive) in enumerate(arrows, 1):  # both ends in their slices, the second not before
            items = (
                {
                    "ph": phase, "name": "message", "cat": "message", "id": number, "bp": "e",
                    "pid": end.rank, "tid": _thread(end.rank, end.row), "ts": _microseconds(tick),
                }
                for phase, end, tick in (("s", send, send.start), ("f", receive, max(send.start, receive.start)))
            )  # fmt: skip
            file.write(",\n" + _json_items(items))
        file.write("\n]}\n")
    single = sum(send is None or receive is None for send, receive in messages)
    return TraceStats(slices, len(arrows), single, len(messages) - single - len(arrows))


def _match_messages(ends: Iterable[MessageEnd]) -> list[tuple[MessageEnd | None, MessageEnd | None]]:
    """Pair sends with receives; None stands for a missing end. Messages with equal keys arrive in sending order."""
    by_key: defaultdict[tuple, tuple[list[MessageEnd], list[MessageEnd]]] = defaultdict(lambda: ([], []))
    for end in ends:
        by_key[end.key][end.is_receive].append(end)
    pairs = (itertools.zip_longest(sorted(sends), sorted(receives)) for sends, receives in by_key.values())
    return list(itertools.chain.from_iterable(pairs))


def matched_messages(ranks: Iterable[tuple[RankEvents, list[Row]]]) -> list[tuple[MessageEnd, MessageEnd]]:
    """Return send and receive of all messages of which both are on the rows of `ranks`, in time order."""
    ends = (end for events, rows in ranks for end in _message_ends(events.rank, rows))
    pairs = [(send, receive) for send, receive in _match_messages(ends) if send and receive]
    return sorted(pairs, key=lambda pair: pair[0].start)


def _message_ends(rank: int, rows_of_rank: list[Row]) -> Iterator[MessageEnd]:
    for number, row in enumerate(rows_of_rank):
        for start, end, event, wait in row.slices:
            if event.name in ("send", "receive") and event.peer >= 0 and not wait:
                is_receive = event.name == "receive"
                sender_receiver = (event.peer, rank) if is_receive else (rank, event.peer)
                key = (*sender_receiver, event.group, event.step, event.direction, event.stage, event.microbatch)
                yield MessageEnd(key, is_receive, start, end, rank, number)


def _json_items(items: Iterable[dict[str, Any]]) -> str:
    return json.dumps(list(items), separators=(",", ":"))[1:-1]


def _thread(rank: int, row: int) -> int:
    """The thread id of a row. The id differs from the process id, which viewers reserve for the main thread."""
    return 1000 * (rank + 1) + row


def _microseconds(ticks: int) -> float:
    return ticks * 1e6 / TICKS_PER_SECOND


def _details(slice: Slice) -> dict[str, Any]:
    """The details that a viewer shows for a selected slice."""
    event = slice.event
    args: dict[str, Any] = {"step": event.step}
    if event.microbatch >= 0:
        args["micro-batch"] = event.microbatch
    if event.chunk >= 0:
        args["chunk"] = event.chunk
    if event.axis == COMPUTE:
        return {**args, "what": event.label} if event.label else args
    args |= {"group": event.group, "sequence": event.sequence}
    if slice.wait:
        return args
    if event.peer >= 0:
        args["peer"] = event.peer
    issued = _microseconds(slice.start) - (event.start - event.issue) * 1e6
    return {**args, "bytes": event.bytes, "issue us": round(issued, 3), "exposed ms": round(event.exposed * 1e3, 6)}
