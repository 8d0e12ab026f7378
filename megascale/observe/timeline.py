"""The merged timeline of a run's ranks, in the Chrome trace format that ui.perfetto.dev opens.

A rank is a process with a row for compute and rows for each axis of communication, all on the clock of rank 0. Arrows
lead from a message's send to its receive.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megascale.core.events import COMPUTE, Event, RankEvents
from megascale.core.files import atomic

START = b'{"displayTimeUnit":"ms","traceEvents":['
"""What a file of a timeline begins with."""

TICKS = 8_000_000
"""Ticks in a second. Slices that overlap by a rounding error are dropped by viewers; an eighth of a microsecond is
exact in the binary floats of all of them.
"""

AXES = ("tp", "pp", "dp", "tied", "world")
"""Axes in the order in which they are shown; others come after these."""


def order(axis: str) -> tuple[int, str]:
    """What to sort axes by."""
    return (AXES.index(axis) if axis in AXES else len(AXES), axis)


class Slice(NamedTuple):
    """A span on a row, in ticks. `wait`: compute waits for the event, a communication; otherwise the event itself."""

    start: int
    end: int
    event: Event
    wait: bool = False

    @property
    def name(self) -> str:
        """As 'F m3 c0', 'dp.reduce_scatter chunk 1' or 'wait dp.reduce_scatter chunk 1'."""
        event = self.event
        if event.axis == COMPUTE:
            microbatch = f" m{event.microbatch}" if event.microbatch >= 0 else ""
            return f"{event.name}{microbatch}{f' c{event.chunk}' if event.chunk >= 0 else ''}"
        return f"{'wait ' if self.wait else ''}{event.axis}.{event.name} {event.what}".rstrip()


@dataclass(frozen=True)
class Row:
    """Slices by their start; of two that touch, one lies within the other."""

    name: str
    slices: list[Slice]


def place(events: RankEvents) -> str:
    """Where a rank stands, as 'pp 1, dp 0, tp 1'."""
    return ", ".join(f"{axis} {events.coord[axis]}" for axis in ("pp", "dp", "tp") if axis in events.coord)


def begins(events: RankEvents) -> dict[int, float]:
    """When the first event of each step begins, in seconds of rank 0's clock."""
    firsts: dict[int, float] = {}
    for event in events.events:
        first = min(itertools.chain([event.start], (start for start, _ in event.waits)))
        firsts[event.step] = min(first, firsts.get(event.step, first))
    return {step: first + events.offset(first) for step, first in firsts.items()}


def rows(events: RankEvents, origin: float) -> list[Row]:
    """The rows of a rank: compute and its waits, then communication. `origin`: seconds of rank 0's clock at tick 0.

    Each time is shifted by its own offset, so that what lies within another thing on the rank's clock does so here.
    """

    def tick(time: float) -> int:
        return round((time + events.offset(time) - origin) * TICKS)

    compute: list[Slice] = []
    axes: defaultdict[str, list[Slice]] = defaultdict(list)
    for event in events.events:
        row = compute if event.axis == COMPUTE else axes[event.axis]
        start = tick(event.start)
        row.append(Slice(start, max(start, tick(event.end)), event))  # a GPU's marks are half a microsecond apart
        waits = (Slice(tick(start), tick(end), event, wait=True) for start, end in event.waits)
        compute += [wait for wait in waits if wait.end > wait.start]
    found = [Row(COMPUTE, nested(compute))]
    for axis in sorted(axes, key=order):
        for number, lane in enumerate(lanes(axes[axis]), 1):
            found.append(Row(axis if number == 1 else f"{axis} {number}", lane))
    return found


def nested(slices: Iterable[Slice]) -> list[Slice]:
    """Slices by their start, the longest first. What would leave the slice in which it begins is cut in two there."""
    queue = [(slice.start, -slice.end, slice.wait, number, slice) for number, slice in enumerate(slices)]
    heapq.heapify(queue)
    found: list[Slice] = []
    ends: list[int] = []  # of the slices that are open, the innermost last
    while queue:
        start, end, wait, number, slice = heapq.heappop(queue)
        while ends and ends[-1] <= start:
            ends.pop()
        if ends and ends[-1] < -end:
            rest = slice._replace(start=ends[-1])
            heapq.heappush(queue, (rest.start, end, wait, number, rest))
            slice = slice._replace(end=ends[-1])
        ends.append(slice.end)
        found.append(slice)
    return found


def lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Slices dealt to as few lanes as they need not to overlap: each to the first lane that is free."""
    found: list[list[Slice]] = []
    for slice in sorted(slices, key=lambda slice: (slice.start, slice.end)):
        free = next((lane for lane in found if lane[-1].end <= slice.start), None)
        if free is None:
            found.append([slice])
        else:
            free.append(slice)
    return found


class Side(NamedTuple):
    """The slice of one side of a message. Both sides have the same key: sender, receiver, group, step, direction, stage
    and micro-batch.
    """

    key: tuple[int, int, str, int, str, int, int]
    received: bool
    start: int
    end: int
    rank: int
    thread: int


@dataclass(frozen=True)
class Part:
    """A rank's part of the file: its items as text, and its sides of messages."""

    rank: int
    slices: int
    text: str
    sides: list[Side]


def part(events: RankEvents, origin: float) -> Part:
    """The part of a rank. `origin`: seconds of rank 0's clock at the timeline's beginning."""
    found = rows(events, origin)
    items = [*_names(events, found), *_slices(events.rank, found)]
    return Part(events.rank, sum(len(row.slices) for row in found), _joined(items), list(_sides(events.rank, found)))


@dataclass(frozen=True)
class Written:
    """What a file holds. Messages without an arrow: `single` are those of which only one side is there, `reversed`
    those that arrived before their send began: the clocks of two ranks differ, or a thread was late to see that the
    message before had gone.
    """

    slices: int
    arrows: int
    single: int
    reversed: int


def write(path: Path, parts: Iterable[Part]) -> Written:
    """Write the timeline, at once or not at all.

    Raises: OSError
    """
    slices, sides, ranks = 0, list[Side](), set[int]()
    with atomic(path, "w") as file:
        file.write(START.decode())
        for part in parts:
            file.write((",\n" if ranks else "\n") + part.text)
            slices += part.slices
            sides += part.sides
            ranks.add(part.rank)
        messages = _matched(side for side in sides if ranks.issuperset(side.key[:2]))
        arrows = [(send, receive) for send, receive in messages if send and receive and send.start <= receive.end]
        # after all slices: an end of an arrow belongs to the slice that is open when a viewer reads it
        for number, (send, receive) in enumerate(arrows, 1):
            file.write(",\n" + _joined(_arrow(number, send, receive)))
        file.write("\n]}\n")
    single = sum(send is None or receive is None for send, receive in messages)
    return Written(slices, len(arrows), single, len(messages) - single - len(arrows))


def _matched(sides: Iterable[Side]) -> list[tuple[Side | None, Side | None]]:
    """Messages: send and receive, or one of them. Where several have the same key, they arrive as they were sent."""
    found: defaultdict[tuple, tuple[list[Side], list[Side]]] = defaultdict(lambda: ([], []))
    for side in sides:
        found[side.key][side.received].append(side)
    pairs = (itertools.zip_longest(sorted(sends), sorted(receives)) for sends, receives in found.values())
    return list(itertools.chain.from_iterable(pairs))


def _arrow(number: int, send: Side, receive: Side) -> Iterator[dict[str, Any]]:
    """The two ends of an arrow, each within its slice; the second is not before the first."""
    for phase, side, tick in (("s", send, send.start), ("f", receive, max(send.start, receive.start))):
        item = {"ph": phase, "name": "message", "cat": "message", "id": number, "bp": "e"}
        yield {**item, "pid": side.rank, "tid": side.thread, "ts": _microseconds(tick)}


def _sides(rank: int, found: list[Row]) -> Iterator[Side]:
    for number, row in enumerate(found):
        for start, end, event, wait in row.slices:
            if event.name in ("send", "receive") and event.peer >= 0 and not wait:
                received = event.name == "receive"
                way = (event.peer, rank) if received else (rank, event.peer)
                key = (*way, event.group, event.step, event.direction, event.stage, event.microbatch)
                yield Side(key, received, start, end, rank, _thread(rank, number))


def _joined(items: Iterable[dict[str, Any]]) -> str:
    return json.dumps(list(items), separators=(",", ":"))[1:-1]


def _thread(rank: int, row: int) -> int:
    """The number of a row. It is never that of its process, which viewers take for the main thread."""
    return 1000 * (rank + 1) + row


def _names(events: RankEvents, found: list[Row]) -> Iterator[dict[str, Any]]:
    """The names of a rank and of its rows, and their order."""
    rank = events.rank
    named: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"rank {rank} ({place(events)})"}),
        ("process_labels", 0, {"labels": events.host}),
        ("process_sort_index", 0, {"sort_index": rank}),
    ]
    for number, row in enumerate(found):
        named.append(("thread_name", number, {"name": row.name}))
        named.append(("thread_sort_index", number, {"sort_index": number}))
    for name, number, args in named:
        yield {"ph": "M", "name": name, "pid": rank, "tid": _thread(rank, number), "args": args}


def _slices(rank: int, found: list[Row]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(found):
        thread = _thread(rank, number)
        for slice in row.slices:
            yield {
                "ph": "X",
                "name": slice.name,
                "cat": "wait" if slice.wait else slice.event.axis,
                "pid": rank,
                "tid": thread,
                "ts": _microseconds(slice.start),
                "dur": _microseconds(slice.end - slice.start),
                "args": _details(slice),
            }


def _microseconds(ticks: int) -> float:
    return ticks * 1e6 / TICKS


def _details(slice: Slice) -> dict[str, Any]:
    """What a viewer shows of the slice that is clicked on."""
    event = slice.event
    args: dict[str, Any] = {"step": event.step}
    if event.microbatch >= 0:
        args["micro-batch"] = event.microbatch
    if event.chunk >= 0:
        args["chunk"] = event.chunk
    if event.axis == COMPUTE:
        return {**args, "what": event.what} if event.what else args
    args |= {"group": event.group, "sequence": event.sequence}
    if slice.wait:
        return args
    if event.peer >= 0:
        args["peer"] = event.peer
    issued = _microseconds(slice.start) - (event.start - event.issue) * 1e6
    return {**args, "bytes": event.bytes, "issue us": round(issued, 3), "exposed ms": round(event.exposed * 1e3, 6)}
