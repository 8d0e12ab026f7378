"""The state of a rank: what it does now, and how far it is in each of its groups, read from the head of its log.

Another process reads it (`record.log_reader`) without the rank's help: while the rank is stopped, hangs in a collective
or holds Python's lock, and after its end.

- `RankState`, `GroupState`, `FlightEvent`, `Wait`: a state as values; `to_dict` and `from_dict` are its JSON form
- `RankStatus`: a state in short, as nodes report it and viewers show it
- `RankRuns`: ranks in short
- `LogError`: what is not a log

The flight recorder of `torch.distributed` is another: a dump that a process writes at its end. `hang.flight` makes
states of its dumps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megascale.core.errors import MegascaleError
from megascale.record import layout
from megascale.record.layout import Phase

UNORDERED_SIGNAL = "unordered_signal"
"""Total of a rank: the number of the signal to it alone at which it has stopped the job."""

SILENT_S = 2.0  # seconds without a heartbeat, eight beats, after which a rank is stopped, or code holds Python's lock
LAST_EVENTS = 16  # events in the JSON form of a record by default, besides those in flight
MAX_OPEN_EVENTS = 32  # most events in flight in the JSON form of a record: the newest


class LogError(MegascaleError):
    """A file that is not, or not yet, the log of a rank, or another form than a state's."""


@dataclass(frozen=True)
class RankRuns:
    """Ranks as runs (first, count, distance), in ascending order: the groups of a layout have one or few."""

    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def from_ranks(cls, ranks: Sequence[int]) -> RankRuns:
        """Describe ranks, whose order is lost."""
        rest, runs = sorted(ranks), []
        while rest:
            distance = rest[1] - rest[0] if len(rest) > 1 else 1
            count = 1
            while count < len(rest) and rest[count] == rest[0] + count * distance:
                count += 1
            runs.append((rest[0], count, distance))
            rest = rest[count:]
        return cls(tuple(runs))

    def __iter__(self) -> Iterator[int]:
        return (first + index * distance for first, count, distance in self.runs for index in range(count))

    def __len__(self) -> int:
        return sum(count for _, count, _ in self.runs)

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and any(
            first <= rank < first + count * distance and (rank - first) % distance == 0
            for first, count, distance in self.runs
        )


@dataclass(frozen=True, slots=True)
class GroupState:
    """How far a rank is in the collectives of a group, or in the messages of one direction to or from a peer.

    `kind`: "collective", "send", "receive", or "control" for control data through the job's store. `ranks`: the group's
    ranks; None if they do not fit into the record. `entered`, `issued` and `completed` are counts: with `issued` = 5
    this rank has issued the sequence numbers 0 to 4. A communication is entered before its issue, and issued once the
    transport has it. `completed` counts up to the newest communication known to have ended. `peer`: global rank, -1 for
    collectives.
    """

    name: str
    kind: str
    ranks: RankRuns | None
    entered: int
    issued: int
    completed: int
    peer: int = -1

    @property
    def key(self) -> str:
        """The state's key in `RankState.groups`: 'dp', 'pp.up send 3', 'world control'."""
        if self.kind == layout.COLLECTIVE:
            return self.name
        return f"{self.name} {self.kind}{f' {self.peer}' if self.peer >= 0 else ''}"


@dataclass(frozen=True, slots=True)
class FlightEvent:
    """An action of compute (`kind` "action") or a communication. `group` is a key of `RankState.groups`, and "" for
    an action.

    Times are ns of the host's monotonic clock: `issued_ns`, or the start of an action; `waiting_ns`, since when compute
    waits, or 0; `ended_ns`, or 0 while in flight.
    """

    kind: str
    name: str
    group: str
    sequence: int
    peer: int
    step: int
    microbatch: int
    chunk: int
    issued_ns: int
    waiting_ns: int
    ended_ns: int
    bytes: int = 0
    part: str = ""
    layer: int = -1


@dataclass(frozen=True, slots=True)
class Wait:
    """The present wait of a rank. `kind`: "issuing" a communication, "waiting" for its end, or for the "device".
    `group`: a key of `RankState.groups`; "" for the device.
    """

    kind: str
    group: str
    sequence: int
    since_ns: int


class RankStatus(NamedTuple):
    """The state of a rank in short.

    `phase`: of `record.layout.Phase`, "" before the rank has begun its record. `step`: the current step, -1 before the
    first. `progress`, `step_time_s`, `first_step`: as in `RankState`. `idle_s`: seconds without progress; `silent_s`:
    without a beat of the rank's heartbeat thread. `waits`: for the end of a communication, or for its device. `state`:
    the letter of /proc/PID/stat (R, S, D, T, Z), "" if unknown, "X" for a rank that has failed. `rss`: bytes.
    """

    rank: int
    pid: int
    phase: str = ""
    step: int = -1
    progress: int = 0
    idle_s: float = 0.0
    silent_s: float = 0.0
    step_time_s: float = 0.0
    first_step: int = 0
    waits: bool = False
    state: str = ""
    rss: int = 0


@dataclass(frozen=True)
class RankState:
    """The state of a rank at a moment, its flight record.

    `start`: seconds since 1970. `progress`: writes so far; a rank that makes no progress writes nothing.
    `heartbeat_ns`: last beat of the rank's heartbeat thread, which stands still in a stopped rank and in one whose code
    holds Python's lock. `updated_ns`: last write. `read_ns`: the reader's time. All times in ns are of the host's
    monotonic clock. `step`: the current step, or the last one; `first_step`: the first of this process, 0 before.
    `step_time_s`: median of recent steps, 0 before the first has ended. `open`: events in flight, `last`: the newest
    events; both oldest first. `folder`: key of the run's folder, `exit_status`: with which the rank has said that it
    ends, None before. `stored_attempt`: in the event store, None until events are stored; with it are known `epoch_ns`,
    the time since 1970 on rank 0's clock at the zero of this host's monotonic clock, the rank's coordinates, and its
    device's FLOP/s, 0 if unknown.

    What others know of the rank, as far as they do: `letter`, the process's state in /proc; `node`; `source`, where the
    state was found, `age_s` seconds after it was read. The JSON form ends with `first_step`: the rest is of this host.
    """

    run: str
    rank: int
    world: int
    pid: int
    attempt: int
    start: float
    progress: int
    heartbeat_ns: int
    updated_ns: int
    read_ns: int
    phase: Phase
    phase_since_ns: int
    step: int
    step_time_s: float
    totals: Mapping[str, float]
    groups: Mapping[str, GroupState]
    wait: Wait | None = None
    open: tuple[FlightEvent, ...] = ()
    last: tuple[FlightEvent, ...] = ()
    first_step: int = 0
    folder: int = 0
    exit_status: int | None = None
    stored_attempt: int | None = None
    epoch_ns: int = 0
    coord: Mapping[str, int] = field(default_factory=dict)
    peak_flops: int = 0
    letter: str = ""
    node: str = ""
    source: str = ""
    age_s: float = 0.0

    @property
    def idle_s(self) -> float:
        """Seconds without progress, when the record was read."""
        return max(0, self.read_ns - self.updated_ns) / 1e9

    @property
    def silent_s(self) -> float:
        """Seconds without a heartbeat, when the record was read."""
        return max(0, self.read_ns - self.heartbeat_ns) / 1e9

    def status(self, now_ns: int, letter: str = "", rss: int = 0) -> RankStatus:
        """Return the state in short, as of `now_ns` of the host's monotonic clock."""
        return RankStatus(
            self.rank,
            self.pid,
            phase=str(self.phase),
            step=self.step,
            progress=self.progress,
            idle_s=max(0, now_ns - self.updated_ns) / 1e9,
            silent_s=max(0, now_ns - self.heartbeat_ns) / 1e9,
            step_time_s=self.step_time_s,
            first_step=self.first_step,
            waits=self.wait is not None and self.wait.kind in ("waiting", "device"),
            state=letter,
            rss=rss,
        )

    def to_dict(self, events: int = LAST_EVENTS) -> dict[str, Any]:
        """Return the JSON form, with the newest `events`: lists in the order of the fields, to be short."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        return plain | {
            "totals": dict(self.totals),
            "groups": [
                [g.name, g.kind, g.ranks and g.ranks.runs, g.entered, g.issued, g.completed, g.peer]
                for g in self.groups.values()
            ],
            "wait": self.wait and [getattr(self.wait, name) for name in Wait.__slots__],
            "open": [
                [getattr(event, name) for name in FlightEvent.__slots__] for event in self.open[-MAX_OPEN_EVENTS:]
            ],
            "last": [
                [getattr(event, name) for name in FlightEvent.__slots__]
                for event in self.last[max(0, len(self.last) - events) :]
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankState:
        """Return the state of a JSON form. Raises: LogError for anything else."""
        try:
            states = [
                GroupState(
                    name, kind, None if runs is None else RankRuns(tuple((a, n, d) for a, n, d in runs)), *numbers
                )
                for name, kind, runs, *numbers in data["groups"]
            ]
            return cls(
                **{name: data[name] for name in _PLAIN if name != "phase"},
                phase=Phase(data["phase"]),
                totals=dict(data["totals"]),
                groups={state.key: state for state in states},
                wait=Wait(*data["wait"]) if data["wait"] else None,
                open=tuple(FlightEvent(*fields) for fields in data["open"]),
                last=tuple(FlightEvent(*fields) for fields in data["last"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise LogError(f"not the JSON form of a flight record: {error}") from None


_PLAIN = (
    "run", "rank", "world", "pid", "attempt", "start", "progress", "heartbeat_ns", "updated_ns", "read_ns", "phase",
    "phase_since_ns", "step", "first_step", "step_time_s",
)  # fmt: skip
