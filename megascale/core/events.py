"""What happened on a rank, and the file that holds it: one record for each action of a step and each communication.

Real and simulated runs write the same format, so what reads one reads the other. Times are seconds of the rank's own
monotonic clock; `RankEvents.offset` says how far rank 0's is ahead.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.core.files import write_text
from megascale.core.label import Label

FORMAT = 2
"""The format that is written. Format 1, which is read too, has one text `what` in the place of `part`, and neither
`layer`, `stage` nor `direction`.
"""

READ = (1, FORMAT)

FOREVER = 1e12
"""Seconds that no clock reaches."""

COMPUTE = "compute"
"""The axis of what is no communication."""

OPTIMIZER_ACTIONS = frozenset({"norms", "directions", "update"})
"""Actions of a step that are the optimizer's: the norm of the gradient, LAMB's first phase, and the update."""


@dataclass(frozen=True, slots=True)
class Event:
    """An action (F, B, update, ...), or a communication.

    `axis` is COMPUTE or the axis of parallelism: tp, dp, pp, tied, world. `name`: the action or the operation. `chunk`
    and `microbatch` are -1 outside a chunk's or a micro-batch's work. `part`, `layer`, `stage`, `direction`: what it
    concerned (`core.label.Label`).

    Of a communication: its `group`, its `sequence` number there, the `bytes` of the whole tensor concerned, the `peer`
    of a message (a rank of the job, else -1), when it was issued, and the `waits`: spans in which this rank's compute
    did nothing but wait for it. Their sum is the exposed time.
    """

    axis: str
    name: str
    part: str
    step: int
    chunk: int
    microbatch: int
    start: float
    end: float
    group: str = ""
    sequence: int = -1
    bytes: int = 0
    peer: int = -1
    issue: float = 0.0
    waits: tuple[tuple[float, float], ...] = ()
    layer: int = -1
    stage: int = -1
    direction: str = ""

    @property
    def what(self) -> str:
        """The label for people, such as 'layer 3 qkv'."""
        return Label(self.part, self.layer, self.stage, self.direction).text(self.microbatch)

    @property
    def exposed(self) -> float:
        """Seconds that compute waited for it."""
        return sum(end - start for start, end in self.waits)


@dataclass(frozen=True)
class RankEvents:
    """The events of one rank, in the order in which they were issued.

    `coord`: its index on each axis. `clock`: measurements (own time, seconds that rank 0's clock is ahead). `dropped`:
    older events that found no room.
    """

    rank: int
    world: int
    coord: dict[str, int]
    host: str
    clock: tuple[tuple[float, float], ...]
    dropped: int
    events: tuple[Event, ...]

    def offset(self, time: float) -> float:
        """Seconds that rank 0's clock is ahead at an own time: between two measurements on the line through them."""
        points = sorted(self.clock)
        if not points:
            return 0.0
        for (t0, offset0), (t1, offset1) in itertools.pairwise(points):
            if t0 <= time <= t1 and t1 > t0:
                return offset0 + (offset1 - offset0) * (time - t0) / (t1 - t0)
        return points[0][1] if time < points[0][0] else points[-1][1]


def file_name(rank: int | str) -> str:
    """The name of a rank's file in a run's folder `events`; of '*', the pattern of all."""
    return f"rank-{rank:0>5}.jsonl" if isinstance(rank, int) else f"rank-{rank}.jsonl"


def write_events(path: Path, events: RankEvents) -> None:
    """Write a line for the rank, then one for each event, at once or not at all.

    Raises: OSError
    """
    head = {key: value for key, value in vars(events).items() if key != "events"}
    lines = [json.dumps({"format": FORMAT, **head})]
    lines += [json.dumps(_fields(event)) for event in events.events]
    write_text(path, "\n".join(lines) + "\n")


def read_events(path: Path) -> RankEvents:
    """Read a rank's file.

    Raises: OSError, ValueError if it is not one
    """
    with open(path, encoding="utf-8") as file:
        first, *rest = file.read().splitlines() or ["{}"]
    head = _object(first)
    if (number := head.pop("format", None)) not in READ:
        raise ValueError(f"not a file of events in format {' or '.join(map(str, READ))}")
    try:
        rank = RankEvents(**head, events=())
        _check(vars(rank), _HEAD)
        _check(rank.coord, dict.fromkeys(rank.coord, int))
        rank = dataclasses.replace(rank, clock=_pairs(rank.clock))
    except (TypeError, ValueError) as error:
        raise ValueError(f"not a file of events: {error}") from None
    return dataclasses.replace(rank, events=tuple(_event(line, at, number) for at, line in enumerate(rest, 2)))


def _fields(event: Event) -> dict[str, Any]:
    """The fields that say something."""
    defaults = {f.name: f.default for f in dataclasses.fields(Event)}
    values = {name: getattr(event, name) for name in defaults}
    return {name: value for name, value in values.items() if value != defaults[name]}


def _event(line: str, number: int, written: int) -> Event:
    """Read the event on line `number` of a file in format `written`."""
    try:
        fields = _object(line)
        if written == 1 and "what" in fields:
            fields["part"] = fields.pop("what")
        fields["waits"] = _pairs(fields.get("waits", ()))
        event = Event(**fields)
        _check(fields, _EVENT)
        return event
    except (TypeError, ValueError) as error:
        raise ValueError(f"line {number} is not an event: {error}") from None


_NUMBER = (int, float)
_EVENT: dict[str, Any] = {
    **dict.fromkeys(("axis", "name", "part", "group", "direction"), str),
    **dict.fromkeys(("step", "chunk", "microbatch", "sequence", "bytes", "peer", "layer", "stage"), int),
    **dict.fromkeys(("start", "end", "issue"), _NUMBER),
}
_HEAD: dict[str, Any] = {"rank": int, "world": int, "coord": dict, "host": str, "dropped": int}


def _check(values: dict[str, Any], kinds: dict[str, Any]) -> None:
    """Raises: TypeError or ValueError if a value is not of its kind, or no time"""
    for name, value in values.items():
        kind = kinds.get(name, object)
        if not isinstance(value, kind):
            raise TypeError(f"{name} is {value!r}")
        if kind is _NUMBER and not abs(value) < FOREVER:
            raise ValueError(f"{name} is {value!r}")


def _pairs(values: Any) -> tuple[tuple[float, float], ...]:
    pairs = tuple((first, second) for first, second in values)
    for first, second in pairs:
        if not (isinstance(first, _NUMBER) and isinstance(second, _NUMBER)):
            raise TypeError(f"a time is {first!r} or {second!r}")
        if not (abs(first) < FOREVER and abs(second) < FOREVER):
            raise ValueError(f"a time is {first!r} or {second!r}")
    return pairs


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:  # it would call every line the first
        raise ValueError(f"{error.msg.removesuffix(' at')} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value
