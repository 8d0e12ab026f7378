"""The ledger of a rank: every action of a step and every communication, with its times and what waited for it.

Recording never waits for the device: moments are marks, which become seconds when they are read. The newest records
are kept in a ring; what each axis communicated and exposed is added up for the metrics of each step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megascale.core.events import COMPUTE, Event
from megascale.core.label import Label, What
from megascale.device import HostTimer, Mark, Timer

_UNNAMED = nullcontext()


def profiled(name: str) -> AbstractContextManager[Any]:
    """For a `with` block: what torch's profiler, if it runs, calls the work in it."""
    running = torch.autograd.profiler._is_profiler_enabled
    return torch.autograd.profiler.record_function(name) if running else _UNNAMED


CAPACITY = 1 << 15
"""Records that are kept: a hundred steps of a small job, some of a large one; about 10 MB."""

MOST = 32
"""Records that are settled at once while a step is issued: a tenth of a millisecond."""


MemoryKind = Literal["parameters", "gradients", "optimizer", "activations", "logits", "buffers"]
"""The purpose of a tensor."""


@dataclass
class Traffic:
    """Calls, bytes of the whole tensors concerned, and seconds that compute waited."""

    calls: int = 0
    bytes: int = 0
    exposed_s: float = 0.0

    def mean(self, steps: int) -> dict[str, float]:
        """What it is in one of so many steps."""
        return {"calls": self.calls / steps, "bytes": self.bytes / steps, "exposed_s": self.exposed_s / steps}


class Record:
    """An action or a communication on its way: see `core.events.Event` for the fields.

    `end` is None until it is known; a record is `closed` when nothing of it will change.
    """

    __slots__ = (
        "axis", "bytes", "chunk", "closed", "end", "group", "issue", "label", "microbatch", "name", "peer", "sequence",
        "step", "waits",
    )  # fmt: skip

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
    """Takes records in the order in which they are issued. `step` is the step that is being trained, from 1; what is
    issued outside of steps, under 0, is kept but is nobody's traffic. One that is not `on` takes and marks nothing.
    """

    def __init__(self, timer: Timer | None = None, capacity: int = CAPACITY, *, on: bool = True) -> None:
        self.timer = timer or HostTimer()
        self.mark: Callable[[], Mark] = self.timer.mark if on else lambda: 0.0
        self._void = None if on else Record("", "", Label(), 0.0)  # stands for every record that is not taken
        self.step = 0
        self.dropped = 0
        self._place = (-1, -1)
        self._ring: deque[Record] = deque(maxlen=capacity)
        self._marked: deque[Record] = deque()  # their marks are not yet seconds
        self._sequences: defaultdict[str, int] = defaultdict(int)
        self._traffic: defaultdict[str, Traffic] = defaultdict(Traffic)

    def action(self, name: str, chunk: int = -1, microbatch: int = -1) -> AbstractContextManager[None]:
        """For a `with` block: compute that has a name. Communication inside it belongs to its chunk and micro-batch."""
        return _UNNAMED if self._void is not None else Action(self, name, chunk, microbatch)

    def place(self, chunk: int, microbatch: int = -1) -> AbstractContextManager[None]:
        """For a `with` block: communication inside it belongs to a chunk and a micro-batch, outside of compute."""
        return _UNNAMED if self._void is not None else Place(self, chunk, microbatch)

    def memory(self, kind: MemoryKind) -> AbstractContextManager[None]:
        """For a `with` block: tensors made in it are of this kind, for who counts memory (`dryrun.account`)."""
        return _UNNAMED

    def communication(self, axis: str, group: str, name: str, what: What, nbytes: int, peer: int = -1) -> Record:
        """Record a communication that is about to be issued."""
        if self._void is not None:
            return self._void
        record = self._add(Record(axis, name, Label.of(what), self.mark()))
        record.group, record.bytes, record.peer = group, nbytes, peer
        record.sequence = self._sequences[group]
        self._sequences[group] += 1
        if self.step:
            self._traffic[axis].calls += 1
            self._traffic[axis].bytes += nbytes
        return record

    def waited(self, record: Record, start: Mark) -> Mark:
        """Compute has waited for a communication since `start`. Returns the end of the wait."""
        if self._void is not None:
            return start
        end = self.mark()
        record.waits.append((start, end))
        if self.timer.host and record.step:
            self._traffic[record.axis].exposed_s += end - start  # type: ignore[operator]
        return end

    def take_traffic(self) -> dict[str, Traffic]:
        """What each axis has communicated since the last call. On a GPU a wait counts once the device is past it."""
        self.settle()
        found, self._traffic = dict(self._traffic), defaultdict(Traffic)
        return found

    def events(self) -> list[Event]:
        """What is kept, of all that is done. A communication starts when it is issued and the one before it in its
        channel is done.
        """
        self.settle()
        ends: dict[tuple[Any, ...], float] = {}
        return [_event(record, ends) for record in self._ring if record.closed and isinstance(record.issue, float)]

    def _add(self, record: Record) -> Record:
        record.step = self.step
        record.chunk, record.microbatch = self._place
        self.dropped += len(self._ring) == self._ring.maxlen
        self._ring.append(record)
        if not self.timer.host:
            self._marked.append(record)
        return record

    def settle(self) -> None:
        """Turn all marks that the device has passed into seconds, and let go of them."""
        self._marked = deque(record for record in self._marked if not self._to_seconds(record))

    def keep_up(self) -> None:
        """Settle some of the oldest records, for a step in which the host is ahead of its device: up to the first that
        is not complete, and none if the device has begun with the newest and may soon have to wait for the host.
        """
        if not self._marked or self.timer.seconds(self._marked[-1].issue) is not None:
            return
        for _ in range(min(MOST, len(self._marked))):
            if not self._to_seconds(self._marked[0]):
                return
            self._marked.popleft()

    def trails(self, until: Mark) -> bool:
        """Whether the device, on its way to the mark `until`, leaves more records to settle than are soon done."""
        return len(self._marked) > MOST and self.timer.seconds(until) is None

    def _to_seconds(self, record: Record) -> bool:
        """Whether the record is settled, for it is complete and the device past it."""
        if not record.closed or record.end is None:
            return False
        times: list[float] = []
        for mark in (record.end, record.issue, *(mark for wait in record.waits for mark in wait)):
            if (seconds := self.timer.seconds(mark)) is None:
                return False
            times.append(seconds)
        record.end, record.issue = times[:2]
        record.waits = list(zip(times[2::2], times[3::2], strict=True))
        if record.axis != COMPUTE and record.step:
            self._traffic[record.axis].exposed_s += sum(b - a for a, b in zip(times[2::2], times[3::2], strict=True))
        return True


def _event(record: Record, ends: dict[tuple[Any, ...], float]) -> Event:
    issue, end, waits = record.issue, record.end, tuple(record.waits)
    assert isinstance(issue, float) and isinstance(end, float), "closed and settled"
    start = issue
    if record.axis != COMPUTE:
        channel = (record.group, record.name if record.peer >= 0 else "", record.peer)
        before = ends.get(channel, issue)
        start = min(max(issue, before), end)
        ends[channel] = max(before, end)  # one that is waited for at once may overtake those in the background
    label = record.label
    return Event(
        record.axis, record.name, label.part, record.step, record.chunk, record.microbatch, start, end, record.group,
        record.sequence, record.bytes, record.peer, issue, waits,  # type: ignore[arg-type]
        label.layer, label.stage, label.direction,
    )  # fmt: skip


class Place(AbstractContextManager[None]):
    """What is recorded from entering a `with` block to leaving it belongs to a chunk and a micro-batch."""

    __slots__ = ("_before", "_place", "_recorder")

    def __init__(self, recorder: Recorder, chunk: int, microbatch: int) -> None:
        self._recorder = recorder
        self._place = (chunk, microbatch)

    def __enter__(self) -> None:
        self._before, self._recorder._place = self._recorder._place, self._place

    def __exit__(self, *_: object) -> None:
        self._recorder._place = self._before


class Action(Place):
    """A named piece of compute, from entering a `with` block to leaving it. torch's profiler, if it runs, sees it."""

    __slots__ = ("_name", "_range", "_record")

    def __init__(self, recorder: Recorder, name: str, chunk: int, microbatch: int) -> None:
        super().__init__(recorder, chunk, microbatch)
        self._name = name

    def __enter__(self) -> None:
        super().__enter__()
        self._range = profiled(self._name)
        self._range.__enter__()
        self._record = self._recorder._add(Record(COMPUTE, self._name, Label(), self._recorder.mark()))

    def __exit__(self, *_: object) -> None:
        self._record.end = self._recorder.mark()
        self._record.closed = True
        self._range.__exit__(None, None, None)
        super().__exit__()
