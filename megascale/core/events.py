"""The event format: one record per action of a step and per communication, and one file per rank.

`Event` is a record, `RankEvents` a rank's file in memory; `write_events` and `read_events` convert. Real and simulated
runs share the format. Times are in seconds on the rank's monotonic clock; `RankEvents.clock_offset` relates the clock
to rank 0's.
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
"""The version written to files. Version 1 has a text `what` in place of `part`, `layer`, `stage` and `direction`."""

READABLE_FORMATS = (1, FORMAT)

MAX_TIME_S = 1e12
"""Upper bound of every valid time, in seconds."""

COMPUTE = "compute"
"""The axis of compute actions."""

HOST_AXIS = "host"
"""The axis of what the host does beside compute and communication: data, gc, evaluation, checkpoint, pause."""

PAUSE = "pause"
"""The activity of the host in which the process does nothing: it is stopped or frozen, gets no core, or a call holds
Python's lock. It lies in other actions and waits, so that none of it is exposed.
"""

OPTIMIZER_ACTIONS = frozenset({"grad_norm", "compute_updates", "update"})
"""The optimizer's actions in a step: gradient norm, LAMB's first phase (update directions), and update."""


@dataclass(frozen=True, slots=True)
class Event:
    """A compute action (F, B, update, ...) or a communication.

    `axis`: COMPUTE, or the axis of parallelism (tp, cp, dp, pp, tied, world). `name`: the action, or the collective or
    point-to-point operation. `chunk` and `microbatch`: -1 for work that belongs to no model chunk or micro-batch.
    `part`, `layer`, `stage`, `direction`: the tensor's label (`core.label.Label`).

    Communications also have their `group`, their `sequence` number in the group, the `bytes` of the full tensor, the
    global rank of the `peer` of a point-to-point message (else -1), the time of `issue`, and `waits`: the spans in
    which compute on this rank waited for the communication. The sum of the waits is the exposed time.
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
    def label(self) -> str:
        """The label as text, such as 'layer 3 qkv'."""
        return Label(self.part, self.layer, self.stage, self.direction).text(self.microbatch)

    @property
    def exposed(self) -> float:
        """Exposed time in seconds."""
        return sum(end - start for start, end in self.waits)


@dataclass(frozen=True)
class RankEvents:
    """The events of one rank in order of issue.

    `coord`: the rank's index on each axis. `clock`: measurements (local time, offset of rank 0's clock), in seconds.
    `dropped`: number of old events that were overwritten in the ring buffer.
    """

    rank: int
    world: int
    coord: dict[str, int]
    host: str
    clock: tuple[tuple[float, float], ...]
    dropped: int
    events: tuple[Event, ...]

    def clock_offset(self, time: float) -> float:
        """Seconds by which rank 0's clock is ahead at a local time, interpolated linearly between measurements."""
        points = sorted(self.clock)
        if not points:
            return 0.0
        for (t0, offset0), (t1, offset1) in itertools.pairwise(points):
            if t0 <= time <= t1 and t1 > t0:
                return offset0 + (offset1 - offset0) * (time - t0) / (t1 - t0)
        return points[0][1] if time < points[0][0] else points[-1][1]


def event_file_name(rank: int | str) -> str:
    """Name of a rank's file in a run's folder `events`; for '*' the glob pattern of all files."""
    return f"rank-{rank:0>5}.jsonl" if isinstance(rank, int) else f"rank-{rank}.jsonl"


def write_events(path: Path, events: RankEvents) -> None:
    """Write a header line, then a line per event, atomically.

    Raises: OSError
    """
    head = {key: value for key, value in vars(events).items() if key != "events"}
    lines = [json.dumps({"format": FORMAT, **head})]
    lines += [json.dumps(_fields(event)) for event in events.events]
    write_text(path, "\n".join(lines) + "\n")


def read_events(path: Path) -> RankEvents:
    """Read a rank's file.

    Raises: OSError; ValueError, with the line number, for a file in another format.
    """
    with open(path, encoding="utf-8") as file:
        first, *rest = file.read().splitlines() or ["{}"]
    head = _object(first)
    if (version := head.pop("format", None)) not in READABLE_FORMATS:
        raise ValueError(f"not a file of events in format {' or '.join(map(str, READABLE_FORMATS))}")
    try:
        rank = RankEvents(**head, events=())
        _check_types(vars(rank), _HEAD)
        _check_types(rank.coord, dict.fromkeys(rank.coord, int))
        rank = dataclasses.replace(rank, clock=_pairs(rank.clock))
    except (TypeError, ValueError) as error:
        raise ValueError(f"not a file of events: {error}") from None
    return dataclasses.replace(
        rank, events=tuple(_parse_event(line, number, version) for number, line in enumerate(rest, 2))
    )


def _fields(event: Event) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    defaults = {f.name: f.default for f in dataclasses.fields(Event)}
    values = {name: getattr(event, name) for name in defaults}
    return {name: value for name, value in values.items() if value != defaults[name]}


def _parse_event(line: str, number: int, version: int) -> Event:
    """Parse line `number` of a file in version `version`."""
    try:
        fields = _object(line)
        if version == 1 and "what" in fields:
            fields["part"] = fields.pop("what")
        fields["waits"] = _pairs(fields.get("waits", ()))
        event = Event(**fields)
        _check_types(fields, _EVENT)
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


def _check_types(values: dict[str, Any], types: dict[str, Any]) -> None:
    """Raises: TypeError for a value of another type, ValueError for a time out of range."""
    for name, value in values.items():
        expected = types.get(name, object)
        if not isinstance(value, expected):
            raise TypeError(f"{name} is {value!r}")
        if expected is _NUMBER and not abs(value) < MAX_TIME_S:
            raise ValueError(f"{name} is {value!r}")


def _pairs(values: Any) -> tuple[tuple[float, float], ...]:
    pairs = tuple((first, second) for first, second in values)
    for first, second in pairs:
        if not (isinstance(first, _NUMBER) and isinstance(second, _NUMBER)):
            raise TypeError(f"a time is {first!r} or {second!r}")
        if not (abs(first) < MAX_TIME_S and abs(second) < MAX_TIME_S):
            raise ValueError(f"a time is {first!r} or {second!r}")
    return pairs


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:  # the message's line number would always be 1
        raise ValueError(f"{error.msg.removesuffix(' at')} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value
