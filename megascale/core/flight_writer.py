"""The writer of a rank's flight record: plain stores into shared memory, no system call, about a microsecond each.

- `FlightRecordWriter`: the rank's record
- `open_flight_record`: its file

One thread writes at a time, the rank's; only `beat` may be called from another thread. A reader recognizes a copy cut
by a write at its version: odd while a write is under way, and another one after it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megascale.core import flight_layout as layout
from megascale.core.flight_layout import COLLECTIVE, EVENT, EVENTS, EVENTS_OFFSET, PHASES, WORD, Phase
from megascale.core.flight_tables import FlightTables
from megascale.core.label import Label
from megascale.core.shared_file import map_new_file
from megascale.core.start_parts import StartParts

HEARTBEAT_S = 0.25
"""Seconds between beats of the heartbeat thread."""

MIN_PAUSE_S = 0.1
"""Least seconds by which a beat is late, to be a pause of the process."""

RECENT_STEPS = 5
"""Steps of the median step time."""

Handle = tuple[int, int, int]
"""A communication in the record: its row in the table of groups, its sequence number, the number of its event."""

MOST_PAUSES = 1000
"""Most pauses that are kept until a step ends."""

Place = tuple[int, int, int]
"""Step (0 outside of steps), chunk and micro-batch (-1: none) of an event."""

NO_PLACE: Place = (0, -1, -1)

# names of this module, because a look-up in another module costs a twentieth of a write
_pack_event, _now = EVENT.pack_into, time.monotonic_ns
_VERSION, _UPDATED = layout.VERSION, layout.UPDATED
_WAIT_GROUP, _WAIT_SEQUENCE, _WAIT_SINCE = layout.WAIT_GROUP, layout.WAIT_SEQUENCE, layout.WAIT_SINCE
_WAIT_KIND, _NO_WAIT, _ISSUING, _WAITING = layout.WAIT_KIND, layout.NO_WAIT, layout.ISSUING, layout.WAITING
_ENTERED, _ISSUED, _COMPLETED = layout.GROUP_ENTERED, layout.GROUP_ISSUED, layout.GROUP_COMPLETED
_EVENT_BYTES, _EVENTS_WORD, _EVENT_WORDS = EVENT.size, EVENTS_OFFSET // WORD, EVENT.size // WORD


@dataclass(frozen=True)
class FlightIdentity:
    """The head of a record. `folder`: key of the run's folder."""

    run: str = ""
    rank: int = 0
    world: int = 1
    attempt: int = 0
    folder: int = 0


class FlightRecordWriter:
    """The record of this process in `memory`, of `layout.FILE_BYTES` zero bytes; by default memory of its own, which no
    other process reads. `path`: of its file. `start_parts`: the phases of this process's start, and parts of them.
    `pauses`: start and end, on the monotonic clock, of the times in which the heartbeat stood still.
    """

    path: Path | None = None

    def __init__(self, identity: FlightIdentity = FlightIdentity(), memory: mmap.mmap | None = None) -> None:
        self._memory = memory if memory is not None else mmap.mmap(-1, layout.FILE_BYTES)
        self._words = words = memoryview(self._memory).cast("q")
        self.tables = FlightTables(self._memory, words)
        self._version = self._events = 0
        self._entered: list[int] = []  # by row
        self._phase = Phase.IMPORT
        self.start_parts = StartParts()
        self.pauses: deque[tuple[float, float]] = deque(maxlen=MOST_PAUSES)
        self._step_times: deque[float] = deque(maxlen=RECENT_STEPS)
        self._counts: Counter[str] = Counter()
        head = {
            layout.FORMAT_WORD: layout.FORMAT, layout.RANK: identity.rank, layout.WORLD: identity.world,
            layout.PID: os.getpid(), layout.ATTEMPT: identity.attempt, layout.START: time.time_ns(),
            layout.PHASE_SINCE: _now(), layout.HEARTBEAT: _now(), layout.UPDATED: _now(),
            layout.FOLDER: identity.folder,
        }  # fmt: skip
        for place, number in head.items():
            words[place] = number
        self.tables.write_text(layout.RUN_OFFSET, layout.RUN_BYTES, identity.run)
        words[layout.MAGIC_WORD] = layout.MAGIC  # last: the record is complete now

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

    def end(self, status: int) -> None:
        """Say with which exit status this process is about to end, in order or not."""
        self._words[layout.EXIT_STATUS] = status + 1

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Set the phase of a `with` block, and the previous one after it; after an error the phase stays."""
        previous = self._phase
        self.set_phase(phase)
        yield
        self.set_phase(previous)

    def begin_step(self, step: int) -> None:
        """Set the current step, from 1."""
        self._words[layout.STEP] = step
        self._words[layout.FIRST_STEP] = self._words[layout.FIRST_STEP] or step
        self._words[layout.STEP_SINCE] = _now()
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

    def enter(
        self, group: str, operation: str, label: Label = Label(), nbytes: int = 0, peer: int = -1,
        place: Place = NO_PLACE, kind: str = COLLECTIVE,
    ) -> Handle:  # fmt: skip
        """Note a communication that is about to be issued. A message has a `peer`, a global rank, and `kind` "send" or
        "receive".
        """
        tables, words = self.tables, self._words
        row = tables.rows.get((group, kind, peer))
        if row is None:
            row = self._add_row(group, kind, peer)
        self._version = words[_VERSION] = self._version + 1
        now, sequence, number = _now(), self._entered[row], self._events
        self._entered[row], self._events = sequence + 1, number + 1
        part, layer, _, _ = label
        step, chunk, microbatch = place
        name, part_index = tables.strings.get(operation), tables.strings.get(part)
        _pack_event(
            self._memory, EVENTS_OFFSET + number % EVENTS * _EVENT_BYTES, number + 1, now, 0, 0, sequence, nbytes, step,
            peer, microbatch, chunk, row, tables.string(operation) if name is None else name,
            tables.string(part) if part_index is None else part_index, layer,
        )  # fmt: skip
        words[tables.row_words[row] + _ENTERED] = sequence + 1
        words[_WAIT_GROUP] = row
        words[_WAIT_SEQUENCE] = sequence
        words[_WAIT_SINCE] = words[_UPDATED] = now
        words[_WAIT_KIND] = _ISSUING
        self._version = words[_VERSION] = self._version + 1
        return row, sequence, number

    def issued(self, handle: Handle) -> None:
        """Note that the transport has a communication."""
        row, sequence, _ = handle
        words = self._words
        words[self.tables.row_words[row] + _ISSUED] = sequence + 1
        words[_WAIT_KIND] = _NO_WAIT
        words[_UPDATED] = _now()
        self._version = words[_VERSION] = self._version + 2

    def begin_wait(self, handle: Handle) -> None:
        """Note that this rank waits for the end of a communication."""
        row, sequence, number = handle
        words, now = self._words, _now()
        self._version = words[_VERSION] = self._version + 1
        words[_WAIT_GROUP] = row
        words[_WAIT_SEQUENCE] = sequence
        words[_WAIT_SINCE] = words[_UPDATED] = now
        words[_WAIT_KIND] = _WAITING
        if number >= self._events - EVENTS:  # else a newer event has its place
            words[_EVENTS_WORD + number % EVENTS * _EVENT_WORDS + layout.EVENT_WAITING] = now
        self._version = words[_VERSION] = self._version + 1

    def complete(self, handle: Handle) -> None:
        """Note the end of a communication, and of a wait for it."""
        row, sequence, number = handle
        words, now = self._words, _now()
        self._version = words[_VERSION] = self._version + 1
        if words[_WAIT_SEQUENCE] == sequence and words[_WAIT_GROUP] == row and words[_WAIT_KIND] == _WAITING:
            words[_WAIT_KIND] = _NO_WAIT
        place = self.tables.row_words[row] + _COMPLETED
        if words[place] <= sequence:  # the ends of two communications may be noticed in another order
            words[place] = sequence + 1
        if number >= self._events - EVENTS:
            words[_EVENTS_WORD + number % EVENTS * _EVENT_WORDS + layout.EVENT_ENDED] = now
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

    def begin_action(self, name: str, place: Place) -> int:
        """Note the start of an action of compute. Returns the number of its event."""
        words, now, number = self._words, _now(), self._events
        self._version = words[_VERSION] = self._version + 1
        self._events = number + 1
        index = self.tables.strings.get(name)
        step, chunk, microbatch = place
        _pack_event(
            self._memory, EVENTS_OFFSET + number % EVENTS * _EVENT_BYTES, number + 1, now, 0, 0, -1, 0, step, -1,
            microbatch, chunk, -1, self.tables.string(name) if index is None else index, 0, -1,
        )  # fmt: skip
        words[_UPDATED] = now
        self._version = words[_VERSION] = self._version + 1
        return number

    def end_action(self, number: int) -> None:
        """Note the end of an action."""
        words, now = self._words, _now()
        if number >= self._events - EVENTS:
            words[_EVENTS_WORD + number % EVENTS * _EVENT_WORDS + layout.EVENT_ENDED] = now
        words[_UPDATED] = now
        self._version = words[_VERSION] = self._version + 2

    def _add_row(self, group: str, kind: str, peer: int) -> int:
        row = self.tables.add_row(group, kind, peer)
        if row == len(self._entered):
            self._entered.append(0)
        return row


def start_heartbeat(writer: FlightRecordWriter) -> None:
    """Beat in a thread, to the end of the process. It stands still while another thread holds Python's lock."""

    def run() -> None:
        while True:
            writer.beat()
            time.sleep(HEARTBEAT_S)

    with contextlib.suppress(RuntimeError):  # this process may have no thread left
        threading.Thread(target=run, name="flight record", daemon=True).start()


def open_flight_record(identity: FlightIdentity, path: Path | None) -> FlightRecordWriter:
    """Begin the record of this process in a new file at `path`, and its heartbeat. Without a path, or if the file
    cannot be made (a warning on stderr), the record is in memory that no other process reads.
    """
    if path is None:
        return FlightRecordWriter(identity)
    try:
        memory = map_new_file(path, layout.FILE_BYTES)
    except OSError as error:
        print(f"WARNING: no flight record {path}: {error.strerror or error}", file=sys.stderr)
        return FlightRecordWriter(identity)
    writer = FlightRecordWriter(identity, memory)
    writer.path = path
    start_heartbeat(writer)
    return writer
