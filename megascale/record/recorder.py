"""The recorder of a rank: writes every action of a step and every communication into its log, with times and exposed
waits.

- `Recorder` takes events; `EventRecord`: one that has not ended
- `Timer`, `HostTimer`: moments in a device's work
- `Traffic`: totals of an axis for a step's metrics

Recording never waits for the device: moments are marks, resolved to seconds once the device has passed them.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megascale.record.events import COMPUTE
from megascale.record.label import Label, LabelLike
from megascale.record.layout import COLLECTIVE, MESSAGE_KINDS, Phase
from megascale.record.log import Handle, RankLog

_NULL_CONTEXT = nullcontext()

Mark = Any
"""A moment in a device's work: seconds on a CPU, an object of the device's library on a GPU."""


class Timer(Protocol):
    """Marks moments in a device's work without waiting. Times are seconds of this process's monotonic clock.

    `synchronous`: the issuing thread computes, and its waits are waits of compute.
    """

    synchronous: bool

    def mark(self) -> Mark: ...

    def seconds(self, mark: Mark) -> float | None:
        """Return the time at which the device passed a mark; None if the mark is still ahead."""


class HostTimer:
    """The timer of a CPU, whose work is done when a call returns."""

    synchronous = True

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, mark: Mark) -> float | None:
        assert isinstance(mark, float)
        return mark


MAX_MARKS_AT_ONCE = 32  # most records that `resolve_oldest_marks` resolves while a step is issued: 0.1 ms


MIN_ACTIVITY_S = 1e-4  # shortest activity of the host that is recorded, in seconds

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
    """An action or communication that has not ended, or whose times are not seconds yet.

    `number`: of its event in the log, -1 for none; `handle`: a communication in the log. `end` is None until known.
    `waits` of an action: those inside it.
    """

    __slots__ = (
        "axis", "end", "group", "handle", "issue", "label", "name", "number", "peer", "step", "waits",
    )  # fmt: skip

    handle: Handle

    def __init__(
        self, axis: str, name: str, label: Label, issue: Mark, step: int = 0, group: str = "", peer: int = -1
    ) -> None:
        self.axis = axis
        self.name = name
        self.label = label
        self.issue = issue
        self.step = step
        self.group = group
        self.peer = peer
        self.number = -1
        self.end: Mark | None = None
        self.waits: list[tuple[Mark, Mark]] = []


class Recorder:
    """Records into `log`, by default in memory of its own.

    With `enabled` False no action is recorded, and communications have no times: they are in the rank's state alone.
    `window`: the step whose time an activity of the host takes, from its batch to the next one's; 0 before the first.
    `named_range`: a context manager that names an action in the device's profiler. `on_action`: called with the name of
    an action before it, `after_action` with its record just before its end, by injected faults.
    """

    def __init__(
        self,
        timer: Timer | None = None,
        log: RankLog | None = None,
        *,
        enabled: bool = True,
        named_range: Callable[[str], AbstractContextManager[Any]] = lambda name: _NULL_CONTEXT,
    ) -> None:
        self.timer = timer or HostTimer()
        self.mark: Callable[[], Mark] = self.timer.mark if enabled else lambda: 0.0
        self.log = log or RankLog()
        self._enabled = enabled
        self._named_range = named_range
        self._step = self.window = 0
        self.on_action: Callable[[str], None] | None = None
        self.after_action: Callable[[EventRecord], None] | None = None
        self._current_scope = (-1, -1)
        self._action: EventRecord | None = None  # the current one
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
            self.log.begin_step(step)

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
        with self.log.phase(phase):
            start = time.perf_counter()
            yield
            self.record_activity(phase, start, time.perf_counter(), until=until)

    def record_activity(
        self, name: str, start: float, end: float, *, until: Mark | None = None, exposed: bool = True
    ) -> None:
        """Record an activity of the host, unless it was short. `until`: as in `activity`; not `exposed`: other actions
        and waits have its time.
        """
        if end - start < MIN_ACTIVITY_S:
            return
        exposed_s = end - start if exposed else 0.0
        if until is not None:
            passed = self.timer.seconds(until)
            exposed_s = 0.0 if passed is None else max(0.0, end - max(start, passed))
        self._activities[name] += exposed_s
        self.log.write_activity(name, self.window, start, end, exposed_s)

    def take_activities(self) -> dict[str, float]:
        """Return the seconds that training waited for each activity of the host since the last call."""
        activities, self._activities = dict(self._activities), defaultdict(float)
        return activities

    def memory_kind(self, kind: MemoryKind) -> AbstractContextManager[None]:
        """Mark the tensors of a `with` block as of this kind, for `plan.dryrun.resource_counter`."""
        return _NULL_CONTEXT

    def record_communication(
        self, axis: str, group: str, name: str, label: LabelLike, nbytes: int, peer: int = -1
    ) -> EventRecord:
        """Record a communication, just before its issue."""
        label, kind = Label.from_part(label), name if name in MESSAGE_KINDS else COLLECTIVE
        step, place = self._step, (self._step, *self._current_scope)
        record = EventRecord(axis, name, label, self.mark(), step, group, peer)
        if not self._enabled:
            record.handle = self.log.enter(group, name, label, nbytes, peer, place, kind)
            return record
        sequence = self._sequences[group]
        self._sequences[group] = sequence + 1
        record.handle = self.log.enter(group, name, label, nbytes, peer, place, kind, (axis, sequence))
        record.number = record.handle[2]
        if not self.timer.synchronous:
            self._unresolved.append(record)
        if step:
            self.count_traffic(axis, nbytes)
        return record

    def count_traffic(self, axis: str, nbytes: int, exposed_s: float = 0.0) -> None:
        """Count a communication as traffic of the steps since the last call of `take_traffic`."""
        traffic = self._traffic[axis]
        traffic.calls += 1
        traffic.bytes += nbytes
        traffic.exposed_s += exposed_s

    def record_wait(self, record: EventRecord, start: Mark) -> Mark:
        """Record a wait of compute for a communication, from `start` to the present. Returns the end of the wait."""
        if not self._enabled:
            return start
        end = self.mark()
        record.waits.append((start, end))
        if self._action is not None:
            self._action.waits.append((start, end))
        if self.timer.synchronous and record.step:
            self._traffic[record.axis].exposed_s += end - start
        return end

    def interrupt_action(self, start: float, end: float) -> None:
        """Record that the host did something else in the current action. A device goes on meanwhile."""
        if self._action is not None and self.timer.synchronous:
            self._action.waits.append((start, end))

    def close(self, record: EventRecord, end: Mark, *, known: bool) -> None:
        """Close the record of a communication that ends at `end`. `known`: the device has passed this mark."""
        record.end = end
        if known or self.timer.synchronous or not self._enabled:
            self.log.complete(record.handle)
        else:  # `_resolve` completes it
            self.log.end_wait()
        if self.timer.synchronous:
            self._write_times(record)

    def take_traffic(self) -> dict[str, Traffic]:
        """Return the traffic by axis since the last call. On a GPU a wait counts once the device has passed its end."""
        self.resolve_marks()
        traffic, self._traffic = dict(self._traffic), defaultdict(Traffic)
        return traffic

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
        if record.end is None:
            return False
        times: list[float] = []
        for mark in (record.end, record.issue, *(mark for wait in record.waits for mark in wait)):
            if (seconds := self.timer.seconds(mark)) is None:
                return False
            times.append(seconds)
        record.end, record.issue = times[:2]
        record.waits = list(zip(times[2::2], times[3::2], strict=True))
        if record.axis != COMPUTE:
            self.log.complete(record.handle)
            if record.step:
                self._traffic[record.axis].exposed_s += sum(end - start for start, end in record.waits)
        self._write_times(record)
        return True

    def _write_times(self, record: EventRecord) -> None:
        """Write the times of a record whose marks are seconds. A communication starts at its issue, or at the end of
        the one before it in its channel, if later.
        """
        if record.number < 0:
            return
        issue: float = record.issue
        end: float = record.end  # type: ignore[assignment]
        exposed = 0.0
        for begin, until in record.waits:
            exposed += until - begin
        start = issue
        if record.axis != COMPUTE:
            channel = (record.group, record.name if record.peer >= 0 else "", record.peer)
            previous_end = self._channel_ends.get(channel, issue)
            self._channel_ends[channel] = max(previous_end, end)  # background communication may be overtaken
            start = min(max(issue, previous_end), end)
        self.log.write_times(record.number, issue, start, end, exposed)


Channel = tuple[str, str, int]
"""Communications in their order: the group, and the direction and the peer of messages."""


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
    """A `with` block that is a named action of compute, in the log and in the device's profiler."""

    __slots__ = ("_name", "_outer_action", "_range", "_record")

    def __init__(self, recorder: Recorder, name: str, chunk: int, microbatch: int) -> None:
        super().__init__(recorder, chunk, microbatch)
        self._name = name

    def __enter__(self) -> None:
        super().__enter__()
        recorder = self._recorder
        self._range = recorder._named_range(self._name)
        self._range.__enter__()
        self._outer_action = recorder._action
        record = self._record = recorder._action = EventRecord(COMPUTE, self._name, Label(), recorder.mark())
        if not recorder.timer.synchronous:
            recorder._unresolved.append(record)
        record.number = recorder.log.begin_action(self._name, (recorder._step, *self._scope))

    def __exit__(self, *_: object) -> None:
        recorder, record = self._recorder, self._record
        recorder._action = self._outer_action
        if recorder.after_action is not None:
            recorder.after_action(record)
        record.end = recorder.mark()
        recorder.log.end_action(record.number)
        if recorder.timer.synchronous:
            recorder._write_times(record)
        self._range.__exit__(None, None, None)
        super().__exit__()
