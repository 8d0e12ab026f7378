"""The writer of a rank's log: plain stores into shared memory, no system call, about a microsecond each.

- `RankLog`: the log; `LogIdentity`: whose it is
- `open_log`: in a file that other processes read

One thread writes at a time, the rank's; only `beat` may be called from another thread. Nothing waits for readers: the
newest events overwrite the oldest. `record.layout` tells how readers notice writes under way.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megascale.record import layout
from megascale.record.events import COMPUTE, HOST_AXIS
from megascale.record.label import Label
from megascale.record.layout import COLLECTIVE, EVENT, OPEN, PHASES, PLACE_BYTES, PLACES_OFFSET, UNSTORED, WORD, Phase
from megascale.record.start_parts import StartParts
from megascale.record.tables import LogTables

HEARTBEAT_S = 0.25  # seconds between beats of the heartbeat thread
MIN_PAUSE_S = 0.1  # least seconds by which a beat is late, to be a pause of the process
RECENT_STEPS = 5  # steps of the median step time
MOST_PAUSES = 1000  # most pauses that are kept until a step ends

Handle = tuple[int, int, int]
"""A communication in the log: its row in the table of groups, its sequence number there, the number of its event."""

Place = tuple[int, int, int]
"""Step (0 outside of steps), chunk and micro-batch (-1: none) of an event."""

NO_PLACE: Place = (0, -1, -1)

UNTIMED = ("", -1)  # axis and number of a communication that gets no times and is not stored, such as control data

# names of this module, because a look-up in another module costs a twentieth of a write
_pack_event, _now = layout.EVENT_STRUCT.pack_into, time.monotonic_ns
_pack_times = struct.Struct("<4d").pack_into
_VERSION, _UPDATED, _COUNT = layout.VERSION, layout.UPDATED, layout.COUNT
_WAIT_GROUP, _WAIT_SEQUENCE, _WAIT_SINCE = layout.WAIT_GROUP, layout.WAIT_SEQUENCE, layout.WAIT_SINCE
_WAIT_KIND, _NO_WAIT, _ISSUING, _WAITING = layout.WAIT_KIND, layout.NO_WAIT, layout.ISSUING, layout.WAITING
_ENTERED, _ISSUED, _COMPLETED = layout.GROUP_ENTERED, layout.GROUP_ISSUED, layout.GROUP_COMPLETED
_PLACE_WORDS, _PLACE_HALVES = PLACE_BYTES // WORD, PLACE_BYTES // 2
_FIRST_WAITING = (PLACES_OFFSET + layout.offset_of("waiting_ns")) // WORD
_FIRST_ENDED = (PLACES_OFFSET + layout.offset_of("ended_ns")) // WORD
_FIRST_STATE = (PLACES_OFFSET + layout.offset_of("state")) // 2
_FIRST_TIMES = PLACES_OFFSET + layout.offset_of("issue")


@dataclass(frozen=True)
class LogIdentity:
    """Whose log it is, known at the rank's start. `folder`: key of the run's folder. `note`: for readers, as JSON; the
    events of a log with a note are stored.
    """

    run: str = ""
    rank: int = 0
    world: int = 1
    attempt: int = 0
    folder: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)


class StepRow(NamedTuple):
    """A step, with the fields of a place. Times in seconds of the host's monotonic clock; `train`: without evaluations
    and saves; `tags`: a bit for each of `record.layout.TAGS`.
    """

    start: float
    end: float
    train: float
    tokens: int
    peak_memory_bytes: int
    flops: float
    loss: float
    grad_norm: float
    step: int
    tags: int


class RankLog:
    """The log of this process in `memory`, of zero bytes; by default memory of its own, which no other process reads.

    `path`: of its file. `start_parts`: the phases of this process's start, and parts of them. `pauses`: start and end,
    on the monotonic clock, of the times in which the heartbeat stood still.
    """

    path: Path | None = None

    def __init__(self, identity: LogIdentity = LogIdentity(), memory: mmap.mmap | None = None) -> None:
        self.memory = memory if memory is not None else mmap.mmap(-1, layout.log_bytes(layout.CAPACITY))
        self._words = words = memoryview(self.memory).cast("B").cast("q")
        self._halves = memoryview(self.memory).cast("B").cast("H")
        self.tables = LogTables(self.memory, words)
        self._capacity = (len(self.memory) - PLACES_OFFSET) // PLACE_BYTES
        self._version = self._count = 0
        self._entered: list[int] = []  # by row
        self.start_parts = StartParts()
        self.pauses: deque[tuple[float, float]] = deque(maxlen=MOST_PAUSES)
        self._phase = Phase.IMPORT
        self._step_times: deque[float] = deque(maxlen=RECENT_STEPS)
        self._counts: Counter[str] = Counter()
        head = {
            layout.FORMAT_WORD: layout.FORMAT, layout.RANK: identity.rank, layout.WORLD: identity.world,
            layout.PID: os.getpid(), layout.ATTEMPT: identity.attempt, layout.START: time.time_ns(),
            layout.PLACES: self._capacity, layout.FOLDER: identity.folder, layout.PHASE_SINCE: _now(),
            layout.HEARTBEAT: _now(), layout.UPDATED: _now(),
        }  # fmt: skip
        for place, number in head.items():
            words[place] = number
        self.tables.write_text(layout.RUN_OFFSET, layout.RUN_BYTES, identity.run)
        if identity.note:
            self.tables.write_text(layout.NOTE_OFFSET, layout.NOTE_BYTES, json.dumps(identity.note))
        words[layout.MAGIC_WORD] = layout.MAGIC  # last: the log has begun now

    # The head: what the rank does.

    def beat(self) -> None:
        """Say that this process runs Python code, HEARTBEAT_S after the last time, or later after a pause."""
        last, now = self._words[layout.HEARTBEAT], _now()
        if now - last > (HEARTBEAT_S + MIN_PAUSE_S) * 1e9:
            self.pauses.append((last / 1e9 + HEARTBEAT_S, now / 1e9))
        self._words[layout.HEARTBEAT] = now

    def advance(self) -> None:
        """Count progress that no other write shows, such as a file that was read."""
        self._words[_UPDATED] = _now()
        self._version += 2
        self._words[_VERSION] = self._version

    def set_phase(self, phase: Phase) -> None:
        """Set what this rank does from now on."""
        self._phase = phase
        self.start_parts.begin(phase)
        self._words[layout.PHASE] = PHASES.index(phase)
        self._words[layout.PHASE_SINCE] = _now()
        self.advance()

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Set the phase of a `with` block, and the previous one after it; after an error the phase stays."""
        previous = self._phase
        self.set_phase(phase)
        yield
        self.set_phase(previous)

    def set_ready(self, attempt: int, epoch_ns: int, coord: Mapping[str, int], peak_flops: float) -> None:
        """Set what is known once training begins; events are stored from then on. `attempt`: in the event store."""
        words = self._words
        words[layout.STORED_ATTEMPT], words[layout.EPOCH], words[layout.PEAK_FLOPS] = attempt, epoch_ns, int(peak_flops)
        for axis, place in layout.COORDINATES.items():
            words[place] = coord.get(axis, 0)
        words[layout.READY] = 1

    def end(self, status: int) -> None:
        """Say with which exit status this process is about to end, in order or not."""
        self._words[layout.EXIT_STATUS] = status + 1

    def begin_step(self, step: int) -> None:
        """Set the current step, from 1."""
        self._words[layout.STEP] = step
        self._words[layout.FIRST_STEP] = self._words[layout.FIRST_STEP] or step
        self.advance()

    def end_step(self, seconds: float, totals: Mapping[str, float]) -> None:
        """Note the time of a step, and set totals by name."""
        self._step_times.append(seconds)
        self._words[layout.STEP_TIME] = int(median(self._step_times) * 1e9)
        for name, value in totals.items():
            self.tables.set_total(name, value)
        self.advance()

    def set_total(self, name: str, value: float) -> None:
        """Set a total by name."""
        self.tables.set_total(name, value)

    def count(self, name: str, number: int = 1) -> None:
        """Add to the total of a name; a number of 0 makes it known before the first."""
        self._counts[name] += number
        self.tables.set_total(name, self._counts[name])

    def open_group(self, name: str, ranks: Sequence[int], kind: str = "") -> None:
        """Note the global ranks of a group, before its first communication. `kind`: "control", or "" for the rest."""
        self.tables.open_group(name, ranks, kind)

    def expect(self, group: str, kind: str = COLLECTIVE, peer: int = -1) -> None:
        """Note that this rank takes part in the collectives of a group, or in messages to or from a peer, before the
        first of them: readers tell by it which ranks make the same calls.
        """
        if (group, kind, peer) not in self.tables.rows:
            self._add_row(group, kind, peer)

    def _add_row(self, group: str, kind: str, peer: int) -> int:
        row = self.tables.add_row(group, kind, peer)
        if row == len(self._entered):
            self._entered.append(0)
        return row

    # Communications: entered, issued, waited for, completed.

    def enter(
        self, group: str, operation: str, label: Label = Label(), nbytes: int = 0, peer: int = -1,
        place: Place = NO_PLACE, kind: str = COLLECTIVE, stored: tuple[str, int] = UNTIMED,
    ) -> Handle:  # fmt: skip
        """Note a communication that is about to be issued. A message has a `peer`, a global rank, and `kind` "send" or
        "receive". `stored`: axis, and number in the group, of an event that `write_times` completes.
        """
        axis, sequence = stored
        tables, words = self.tables, self._words
        row = tables.rows.get((group, kind, peer))
        if row is None:
            row = self._add_row(group, kind, peer)
        part, layer, stage, direction = label
        step, chunk, microbatch = place
        texts = tables.texts
        try:
            indices = texts[axis], texts[operation], texts[part], texts[group], texts[direction]
        except KeyError:
            indices = tuple(map(tables.text, (axis, operation, part, group, direction)))  # type: ignore[assignment]
        self._version = words[_VERSION] = self._version + 1
        now, order, number = _now(), self._entered[row], self._count
        self._entered[row] = order + 1
        _pack_event(
            self.memory, PLACES_OFFSET + number % self._capacity * PLACE_BYTES, number + 1, now, 0, 0, order, sequence,
            nbytes, 0.0, 0.0, 0.0, 0.0, step, microbatch, peer, layer, stage, chunk, row, *indices,
            OPEN if axis else UNSTORED,
        )  # fmt: skip
        self._count = words[_COUNT] = number + 1
        words[tables.row_words[row] + _ENTERED] = order + 1
        words[_WAIT_GROUP] = row
        words[_WAIT_SEQUENCE] = order
        words[_WAIT_SINCE] = words[_UPDATED] = now
        words[_WAIT_KIND] = _ISSUING
        self._version = words[_VERSION] = self._version + 1
        return row, order, number

    def issued(self, handle: Handle) -> None:
        """Note that the transport has a communication."""
        row, order, _ = handle
        words = self._words
        words[self.tables.row_words[row] + _ISSUED] = order + 1
        words[_WAIT_KIND] = _NO_WAIT
        words[_UPDATED] = _now()
        self._version = words[_VERSION] = self._version + 2

    def begin_wait(self, handle: Handle) -> None:
        """Note that this rank waits for the end of a communication."""
        row, order, number = handle
        words, now = self._words, _now()
        self._version = words[_VERSION] = self._version + 1
        words[_WAIT_GROUP] = row
        words[_WAIT_SEQUENCE] = order
        words[_WAIT_SINCE] = words[_UPDATED] = now
        words[_WAIT_KIND] = _WAITING
        if number >= self._count - self._capacity:  # else a newer event has its place
            words[_FIRST_WAITING + number % self._capacity * _PLACE_WORDS] = now
        self._version = words[_VERSION] = self._version + 1

    def complete(self, handle: Handle) -> None:
        """Note the end of a communication, and of a wait for it."""
        row, order, number = handle
        words, now = self._words, _now()
        self._version = words[_VERSION] = self._version + 1
        if words[_WAIT_SEQUENCE] == order and words[_WAIT_GROUP] == row and words[_WAIT_KIND] == _WAITING:
            words[_WAIT_KIND] = _NO_WAIT
        place = self.tables.row_words[row] + _COMPLETED
        if words[place] <= order:  # the ends of two communications may be noticed in another order
            words[place] = order + 1
        if number >= self._count - self._capacity:
            words[_FIRST_ENDED + number % self._capacity * _PLACE_WORDS] = now
        words[_UPDATED] = now
        self._version = words[_VERSION] = self._version + 1

    def end_wait(self) -> None:
        """Note that this rank no longer waits, although the communication may be in flight on the device."""
        self._words[_WAIT_KIND] = _NO_WAIT
        self.advance()

    @contextlib.contextmanager
    def device_wait(self) -> Iterator[None]:
        """Note that this rank waits for its device in a `with` block."""
        self._words[_WAIT_SINCE] = _now()
        self._words[_WAIT_KIND] = layout.DEVICE
        self.advance()
        yield
        self.end_wait()

    # Actions, times, activities, steps.

    def begin_action(self, name: str, place: Place) -> int:
        """Note the start of an action of compute. Returns the number of its event."""
        words, number, tables = self._words, self._count, self.tables
        step, chunk, microbatch = place
        indices = tables.text(COMPUTE), tables.text(name)
        self._version = words[_VERSION] = self._version + 1
        now = _now()
        _pack_event(
            self.memory, PLACES_OFFSET + number % self._capacity * PLACE_BYTES, number + 1, now, 0, 0, -1, -1, 0, 0.0,
            0.0, 0.0, 0.0, step, microbatch, -1, -1, -1, chunk, layout.ACTION, *indices, 0, 0, 0, OPEN,
        )  # fmt: skip
        self._count = words[_COUNT] = number + 1
        words[_UPDATED] = now
        self._version = words[_VERSION] = self._version + 1
        return number

    def end_action(self, number: int) -> None:
        """Note the end of an action."""
        words, now = self._words, _now()
        if number >= self._count - self._capacity:
            words[_FIRST_ENDED + number % self._capacity * _PLACE_WORDS] = now
        words[_UPDATED] = now
        self._version = words[_VERSION] = self._version + 2

    def write_times(self, number: int, issue: float, start: float, end: float, exposed: float) -> None:
        """Write when the device came to an event, and how long compute waited, in seconds: the event is complete."""
        if number >= self._count - self._capacity:
            place = number % self._capacity
            _pack_times(self.memory, _FIRST_TIMES + place * PLACE_BYTES, issue, start, end, exposed)
            self._halves[_FIRST_STATE + place * _PLACE_HALVES] = EVENT

    def write_activity(self, name: str, step: int, start: float, end: float, exposed: float) -> None:
        """Write an activity of the host as a whole, in seconds of the monotonic clock."""
        number = self._count
        _pack_event(
            self.memory, PLACES_OFFSET + number % self._capacity * PLACE_BYTES, number + 1, 0, 0, 0, -1, -1, 0, start,
            start, end, exposed, step, -1, -1, -1, -1, -1, layout.ACTIVITY, self.tables.text(HOST_AXIS),
            self.tables.text(name), 0, 0, 0, EVENT,
        )  # fmt: skip
        self._count = self._words[_COUNT] = number + 1

    def write_step(self, row: StepRow) -> None:
        """Write a step."""
        number = self._count
        place = PLACES_OFFSET + number % self._capacity * PLACE_BYTES
        layout.STEP_STRUCT.pack_into(self.memory, place, number + 1, *row, layout.STEP_END)
        self._count = self._words[_COUNT] = number + 1


def open_log(identity: LogIdentity, path: Path | None, capacity: int = layout.SMALL_CAPACITY) -> RankLog:
    """Begin the log of this process in a new file at `path`, and its heartbeat. Without a path, or if the file cannot
    be made (a warning on stderr), the log is in memory that no other process reads.
    """
    if path is None:
        return RankLog(identity)
    try:
        memory = _map_new_file(path, layout.log_bytes(capacity))
    except OSError as error:
        print(f"WARNING: no flight record {path}: {error.strerror or error}", file=sys.stderr)
        return RankLog(identity)
    log = RankLog(identity, memory)
    log.path = path

    def beat() -> None:  # it stands still while another thread holds Python's lock
        while True:
            log.beat()
            time.sleep(HEARTBEAT_S)

    with contextlib.suppress(RuntimeError):  # this process may have no thread left
        threading.Thread(target=beat, name="flight record", daemon=True).start()
    return log


def _map_new_file(path: Path, size: int) -> mmap.mmap:
    """Map a new file of zero bytes, which only this user reads. Raises: OSError, also if shared memory is full"""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)  # writing beyond a full file system would be a SIGBUS
        return mmap.mmap(descriptor, size)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
