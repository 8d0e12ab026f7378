"""The event log of a rank: every action of a step and every communication, with times and exposed waits.

- `Recorder` takes records; `EventRecord` is an open record, `core.events.Event` a complete one
- `Traffic`: totals of an axis for a step's metrics
- `profiler_range`: a named range in torch's profiler

Recording never waits for the device: moments are marks, resolved to seconds once the device has passed them. A ring
holds the newest records. Other processes read, while the rank runs, the flight record that the recorder keeps
(`core.flight_writer`), and the event ring (`core.event_ring`), into which it writes every complete record.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megascale.core.event_ring import NO_COMMUNICATION, EventRing
from megascale.core.events import COMPUTE, HOST_AXIS, Event
from megascale.core.flight_layout import COLLECTIVE, MESSAGE_KINDS, Phase
from megascale.core.flight_writer import FlightRecordWriter, Handle
from megascale.core.label import Label, LabelLike
from megascale.device import HostTimer, Mark, Timer

_NULL_CONTEXT = nullcontext()


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """Name the work of a `with` block in torch's profiler, if the profiler runs."""
    running = torch.autograd.profiler._is_profiler_enabled
    return torch.autograd.profiler.record_function(name) if running else _NULL_CONTEXT


RING_CAPACITY = 1 << 15
"""Records in the ring: a hundred steps of a small job, a few of a large job; about 10 MB."""

MAX_MARKS_AT_ONCE = 32
"""Most records that `resolve_oldest_marks` resolves while a step is issued: 0.1 ms."""


MIN_ACTIVITY_S = 1e-4
"""Shortest activity of the host that the event ring gets, in seconds."""

MemoryKind = Literal["parameters", "gradients", "optimizer", "activations", "logits", "buffers"]
"""The purpose of a tensor."""


@dataclass
class Traffic:
    """Calls, bytes of the full tensors, and exposed seconds (waits of compute)."""

    calls: int = 0
    bytes: int = 0
    exposed_s: float = 0.0

    def per_step(self, steps: int) -> dict[str, float]:
        """Return the means over a number of steps."""
        return {"calls": self.calls / steps, "bytes": self.bytes / steps, "exposed_s": self.exposed_s / steps}


class EventRecord:
    """An action or communication in flight, with the fields of `core.events.Event`.

    `end` is None until known; a `closed` record is complete. `flight`: a communication in the flight record. `waits` of
    an action: those inside it.
    """

    __slots__ = (
        "axis", "bytes", "chunk", "closed", "end", "flight", "group", "issue", "label", "microbatch", "name", "peer",
        "sequence", "step", "waits",
    )  # fmt: skip

    flight: Handle

    def __init__(self, axis: str, name: str, label: Label, issue: Mark) -> None:
        self.axis = axis
        self.name = name
        self.label = label
        self.issue = issue
        self.end: Mark | None = None
        self.closed = False
        self.group = ""
        self.step = self.chunk = self.microbatch = self.sequence = self.peer = -1
        self.bytes = 0
        self.waits: list[tuple[Mark, Mark]] = []


class Recorder:
    """The event log. Records are in the order of their issue.

    `flight` is this rank's flight record, `ring` its event ring, if any. With `enabled` False no action and no
    communication is recorded or marked, and the flight record has no actions. `window`: the step whose time an activity
    of the host takes, from its batch to the next one's; 0 before the first. `on_action`: called with the name of an
    action before it, `after_action` with its record just before its end, by injected faults.
    """

    def __init__(
        self,
        timer: Timer | None = None,
        capacity: int = RING_CAPACITY,
        *,
        enabled: bool = True,
        flight: FlightRecordWriter | None = None,
        ring: EventRing | None = None,
    ) -> None:
        self.timer = timer or HostTimer()
        self.mark: Callable[[], Mark] = self.timer.mark if enabled else lambda: 0.0
        self.flight = flight or FlightRecordWriter()
        self.ring = ring
        self._enabled = enabled
        self._step = self.window = 0
        self.dropped = 0
        self.on_action: Callable[[str], None] | None = None
        self.after_action: Callable[[EventRecord], None] | None = None
        self._current_scope = (-1, -1)
        self._action: EventRecord | None = None  # the current one
        self._ring: deque[EventRecord] = deque(maxlen=capacity)
        self._unresolved: deque[EventRecord] = deque()  # records with marks that are not seconds yet
        self._sequences: defaultdict[str, int] = defaultdict(int)
        self._traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._channel_ends: dict[Channel, float] = {}
        self._activities: defaultdict[str, float] = defaultdict(float)

    @property
    def step(self) -> int:
        """The current step, from 1; 0 outside of steps, where records do not count as traffic."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        if step:
            self.flight.begin_step(step)

    def action(self, name: str, chunk: int = -1, microbatch: int = -1) -> AbstractContextManager[None]:
        """Record a `with` block as a named action of compute, on a model chunk and micro-batch. Communication inside
        gets the same chunk and micro-batch.
        """
        if self.on_action is not None:
            self.on_action(name)
        return ActionScope(self, name, chunk, microbatch) if self._enabled else _NULL_CONTEXT

    def scope(self, chunk: int, microbatch: int = -1) -> AbstractContextManager[None]:
        """Set the chunk and micro-batch of communication in a `with` block, without an action of compute."""
        return Scope(self, chunk, microbatch) if self._enabled else _NULL_CONTEXT

    @contextmanager
    def activity(self, phase: Phase, *, until: Mark | None = None) -> Iterator[None]:
        """Record a `with` block as an activity of the host, and as a phase. `until`: the device works up to this mark,
        and hides the activity.
        """
        with self.flight.phase(phase):
            start = time.perf_counter()
            yield
            self.record_activity(phase, start, time.perf_counter(), until=until)

    def record_activity(
        self, name: str, start: float, end: float, *, until: Mark | None = None, exposed: bool = True
    ) -> None:
        """Write an activity of the host into the event ring, unless it was short. `until`: as in `activity`; not
        `exposed`: other actions and waits have its time.
        """
        if self.ring is None or end - start < MIN_ACTIVITY_S:
            return
        exposed_s = end - start if exposed else 0.0
        if until is not None:
            passed = self.timer.seconds(until)
            exposed_s = 0.0 if passed is None else max(0.0, end - max(start, passed))
        self._activities[name] += exposed_s
        self.ring.write_event(
            HOST_AXIS, name, Label(), (self.window, -1, -1), NO_COMMUNICATION, (start, start, end, exposed_s)
        )

    def take_activities(self) -> dict[str, float]:
        """Return the seconds that training waited for each activity of the host since the last call."""
        activities, self._activities = dict(self._activities), defaultdict(float)
        return activities

    def memory_kind(self, kind: MemoryKind) -> AbstractContextManager[None]:
        """Mark the tensors of a `with` block as of this kind, for `dryrun.resource_counter`."""
        return _NULL_CONTEXT

    def record_communication(
        self, axis: str, group: str, name: str, label: LabelLike, nbytes: int, peer: int = -1
    ) -> EventRecord:
        """Record a communication, just before its issue."""
        label, kind = Label.from_part(label), name if name in MESSAGE_KINDS else COLLECTIVE
        record = EventRecord(axis, name, label, self.mark())
        record.flight = self.flight.enter(group, name, label, nbytes, peer, (self._step, *self._current_scope), kind)
        record.group, record.bytes, record.peer = group, nbytes, peer
        if not self._enabled:
            return record
        self._add(record)
        record.sequence = self._sequences[group]
        self._sequences[group] += 1
        if self._step:
            self._traffic[axis].calls += 1
            self._traffic[axis].bytes += nbytes
        return record

    def record_wait(self, record: EventRecord, start: Mark) -> Mark:
        """Record a wait of compute for a communication, from `start` to the present. Returns the end of the wait."""
        if not self._enabled:
            return start
        end = self.mark()
        record.waits.append((start, end))
        if self._action is not None:
            self._action.waits.append((start, end))
        if self.timer.synchronous and record.step:
            self._traffic[record.axis].exposed_s += end - start  # type: ignore[operator]
        return end

    def interrupt_action(self, start: float, end: float) -> None:
        """Record that the host did something else in the current action. A device goes on meanwhile."""
        if self._action is not None and self.timer.synchronous:
            self._action.waits.append((start, end))

    def close(self, record: EventRecord, end: Mark, *, known: bool) -> None:
        """Close the record of a communication that ends at `end`. `known`: the device has passed this mark."""
        record.end, record.closed = end, True
        if known or self.timer.synchronous or not self._enabled:
            self.flight.complete(record.flight)
        else:  # `_resolve` completes it
            self.flight.end_wait()
        if self.ring is not None and self._enabled and self.timer.synchronous:
            self._write(record)

    def take_traffic(self) -> dict[str, Traffic]:
        """Return the traffic by axis since the last call. On a GPU a wait counts once the device has passed its end."""
        self.resolve_marks()
        traffic, self._traffic = dict(self._traffic), defaultdict(Traffic)
        return traffic

    def events(self) -> list[Event]:
        """Return the complete events in the ring. A communication starts at its issue, or at the end of the previous
        communication of its channel if later.
        """
        self.resolve_marks()
        ends: dict[Channel, float] = {}
        return [_to_event(record, ends) for record in self._ring if record.closed and isinstance(record.issue, float)]

    def _add(self, record: EventRecord) -> EventRecord:
        record.step = self._step
        record.chunk, record.microbatch = self._current_scope
        self.dropped += len(self._ring) == self._ring.maxlen
        self._ring.append(record)
        if not self.timer.synchronous:
            self._unresolved.append(record)
        return record

    def resolve_marks(self) -> None:
        """Resolve all marks that the device has passed to seconds, and release them."""
        self._unresolved = deque(record for record in self._unresolved if not self._resolve(record))

    def resolve_oldest_marks(self) -> None:
        """Resolve a few of the oldest records, up to the first incomplete record. For use during a step, while the
        host is ahead of the device: if the device has reached the newest record, return at once.
        """
        if not self._unresolved or self.timer.seconds(self._unresolved[-1].issue) is not None:
            return
        for _ in range(min(MAX_MARKS_AT_ONCE, len(self._unresolved))):
            if not self._resolve(self._unresolved[0]):
                return
            self._unresolved.popleft()

    def has_backlog(self, until: Mark) -> bool:
        """Return True if the device has not reached `until` and many records are unresolved."""
        return len(self._unresolved) > MAX_MARKS_AT_ONCE and self.timer.seconds(until) is None

    def _resolve(self, record: EventRecord) -> bool:
        """Resolve a record; return False if the record is incomplete or the device has not passed its marks."""
        if not record.closed or record.end is None:
            return False
        times: list[float] = []
        for mark in (record.end, record.issue, *(mark for wait in record.waits for mark in wait)):
            if (seconds := self.timer.seconds(mark)) is None:
                return False
            times.append(seconds)
        record.end, record.issue = times[:2]
        record.waits = list(zip(times[2::2], times[3::2], strict=True))
        if record.axis != COMPUTE:
            self.flight.complete(record.flight)
        if record.axis != COMPUTE and record.step:
            self._traffic[record.axis].exposed_s += sum(b - a for a, b in zip(times[2::2], times[3::2], strict=True))
        if self.ring is not None:
            self._write(record)
        return True

    def _write(self, record: EventRecord) -> None:
        """Write a complete record, whose marks are seconds, into the event ring."""
        assert self.ring is not None
        issue: float = record.issue  # type: ignore[assignment]
        end: float = record.end  # type: ignore[assignment]
        start, exposed = _start(record, issue, end, self._channel_ends), 0.0
        for begin, until in record.waits:
            exposed += until - begin  # type: ignore[operator]
        self.ring.write_event(
            record.axis, record.name, record.label, (record.step, record.chunk, record.microbatch),
            (record.group, record.sequence, record.peer, record.bytes), (issue, start, end, exposed),
        )  # fmt: skip


Channel = tuple[str, str, int]
"""Communications in their order: the group, and the direction and the peer of messages."""


def _start(record: EventRecord, issue: float, end: float, ends: dict[Channel, float]) -> float:
    """Return when a record started: at its issue, or at the end of the previous communication of its channel."""
    if record.axis == COMPUTE:
        return issue
    channel = (record.group, record.name if record.peer >= 0 else "", record.peer)
    previous_end = ends.get(channel, issue)
    ends[channel] = max(previous_end, end)  # a synchronous communication may overtake background communication
    return min(max(issue, previous_end), end)


def _to_event(record: EventRecord, ends: dict[Channel, float]) -> Event:
    issue, end, waits = record.issue, record.end, () if record.axis == COMPUTE else tuple(record.waits)
    assert isinstance(issue, float) and isinstance(end, float), "a closed record with unresolved marks"
    start = _start(record, issue, end, ends)
    label = record.label
    return Event(
        record.axis, record.name, label.part, record.step, record.chunk, record.microbatch, start, end, record.group,
        record.sequence, record.bytes, record.peer, issue, waits,  # type: ignore[arg-type]
        label.layer, label.stage, label.direction,
    )  # fmt: skip


class Scope(AbstractContextManager[None]):
    """A `with` block whose records belong to a chunk and a micro-batch."""

    __slots__ = ("_outer_scope", "_recorder", "_scope")

    def __init__(self, recorder: Recorder, chunk: int, microbatch: int) -> None:
        self._recorder = recorder
        self._scope = (chunk, microbatch)

    def __enter__(self) -> None:
        self._outer_scope, self._recorder._current_scope = self._recorder._current_scope, self._scope

    def __exit__(self, *_: object) -> None:
        self._recorder._current_scope = self._outer_scope


class ActionScope(Scope):
    """A `with` block that is a named action of compute, in the event log and in torch's profiler."""

    __slots__ = ("_flight_event", "_name", "_outer_action", "_range", "_record")

    def __init__(self, recorder: Recorder, name: str, chunk: int, microbatch: int) -> None:
        super().__init__(recorder, chunk, microbatch)
        self._name = name

    def __enter__(self) -> None:
        super().__enter__()
        self._range = profiler_range(self._name)
        self._range.__enter__()
        recorder = self._recorder
        self._outer_action = recorder._action
        self._record = recorder._action = recorder._add(EventRecord(COMPUTE, self._name, Label(), recorder.mark()))
        self._flight_event = recorder.flight.begin_action(self._name, (recorder._step, *self._scope))

    def __exit__(self, *_: object) -> None:
        recorder = self._recorder
        recorder._action = self._outer_action
        if recorder.after_action is not None:
            recorder.after_action(self._record)
        self._record.end = recorder.mark()
        self._record.closed = True
        recorder.flight.end_action(self._flight_event)
        if recorder.ring is not None and recorder.timer.synchronous:
            recorder._write(self._record)
        self._range.__exit__(None, None, None)
        super().__exit__()
