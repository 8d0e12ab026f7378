"""The event ring of a rank: its complete events, in a file in shared memory beside its flight record.

The rank writes (`EventRing`), at about a microsecond a record and without a system call, and never waits for a reader:
the newest records overwrite the oldest. Readers (`core.event_ring_reader`) notice what they have missed.

    header      numbers of 8 bytes: identity, clock, number of records so far
    note        a text in JSON for the readers, such as where the events are stored
    strings     names, in the order of their first use; records hold their index
    records     of RECORD_BYTES: an event, or a step

All numbers are little-endian. Times are seconds of the host's monotonic clock.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.core.label import Label
from megascale.core.shared_file import map_new_file

MAGIC = int.from_bytes(b"MSEVENTS", "little")
FORMAT = 1

WORD = 8
(
    MAGIC_WORD, FORMAT_WORD, RANK, WORLD, PID, ATTEMPT, START, READY, CAPACITY, COUNT, STRING_COUNT, EPOCH, TP, CP, DP,
    PP, PEAK_FLOPS,
) = range(17)  # fmt: skip
"""Places of the header's numbers. START: ns since 1970. READY: 1 once clock and coordinates are known. EPOCH: ns since
1970 on rank 0's clock at the zero of this host's monotonic clock. PEAK_FLOPS: FLOP/s of the device, 0 if unknown.
"""
HEADER_BYTES = 512

NOTE_OFFSET, NOTE_BYTES = HEADER_BYTES, 8192
STRINGS_OFFSET = NOTE_OFFSET + NOTE_BYTES
STRING_BYTES, STRINGS = 64, 1024
OTHER_STRING = 1
"""Index of the string that stands for those that no longer fit; index 0 is the empty string."""

RECORDS_OFFSET = STRINGS_OFFSET + STRING_BYTES * STRINGS
EVENT = struct.Struct("<q4d2q3i3h6H2x")
"""Number (from 1), issue, start, end, exposed; bytes, sequence; step, micro-batch, peer; layer, stage, chunk; axis,
name, part, group, direction, kind.
"""
STEP = struct.Struct("<q3d2qdiIddI2H")
"""Number, start, end, train time; tokens, peak memory; FLOPs; step, tags; loss, gradient norm; unused, kind."""
RECORD_BYTES = EVENT.size
EVENT_KIND, STEP_KIND = 1, 2

NO_COMMUNICATION = ("", -1, -1, 0)
"""Group, sequence, peer and bytes of an event that is no communication."""

CAPACITY_RECORDS = 1 << 15
"""Records in a ring, 2.9 MB: some 20 s of a large job's rank. A collector reads twice a second."""


@dataclass(frozen=True)
class RingIdentity:
    """The head of a ring, known at the rank's start. `note`: for readers, as JSON."""

    rank: int
    world: int
    attempt: int
    note: Mapping[str, Any]


@dataclass(frozen=True)
class StepRow:
    """A step. Times in seconds of the host's monotonic clock; `tags`: a bit for each of `store.schema.TAGS`."""

    step: int
    start: float
    end: float
    train: float
    tags: int
    loss: float
    grad_norm: float
    tokens: int
    flops: float
    peak_memory: int


def event_ring_path(flight_record: Path) -> Path:
    """Return the path of the ring of the rank with this flight record."""
    return flight_record.with_suffix(".events")


class EventRing:
    """Writes the ring of a rank into `memory`. One thread writes."""

    def __init__(self, memory: mmap.mmap, identity: RingIdentity) -> None:
        self._memory = memory
        self._words = words = memoryview(memory).cast("q")
        self._capacity = (len(memory) - RECORDS_OFFSET) // RECORD_BYTES
        self._count = 0
        self._strings: dict[str, int] = {}
        for text in ("", "(other)"):
            self._string(text)
        note = json.dumps(identity.note).encode()
        memory[NOTE_OFFSET : NOTE_OFFSET + len(note)] = note
        head = {
            FORMAT_WORD: FORMAT, RANK: identity.rank, WORLD: identity.world, PID: os.getpid(), START: time.time_ns(),
            ATTEMPT: identity.attempt, CAPACITY: self._capacity,
        }  # fmt: skip
        for place, number in head.items():
            words[place] = number
        words[MAGIC_WORD] = MAGIC  # last: the head is complete now

    def set_ready(self, attempt: int, epoch_ns: int, coord: Mapping[str, int], peak_flops: float) -> None:
        """Set what is known once training begins; readers store nothing before."""
        head = {ATTEMPT: attempt, EPOCH: epoch_ns, PEAK_FLOPS: int(peak_flops)}
        for place, axis in ((TP, "tp"), (CP, "cp"), (DP, "dp"), (PP, "pp")):
            head[place] = coord.get(axis, 0)
        for place, number in head.items():
            self._words[place] = number
        self._words[READY] = 1

    def write_event(
        self, axis: str, name: str, label: Label, place: tuple[int, int, int], communication: tuple[str, int, int, int],
        times: tuple[float, float, float, float],
    ) -> None:  # fmt: skip
        """Write an event. `place`: step, chunk, micro-batch; `communication`: group, sequence, peer, bytes; `times`:
        issue, start, end, exposed.
        """
        strings, count = self._strings, self._count
        part, layer, stage, direction = label
        step, chunk, microbatch = place
        group, sequence, peer, size = communication
        try:
            indices = strings[axis], strings[name], strings[part], strings[group], strings[direction]
        except KeyError:
            indices = tuple(map(self._string, (axis, name, part, group, direction)))  # type: ignore[assignment]
        _pack_event(
            self._memory, RECORDS_OFFSET + count % self._capacity * RECORD_BYTES, count + 1, *times, size, sequence,
            step, microbatch, peer, layer, stage, chunk, *indices, EVENT_KIND,
        )  # fmt: skip
        self._count = self._words[COUNT] = count + 1

    def write_step(self, row: StepRow) -> None:
        """Write a step."""
        STEP.pack_into(
            self._memory, RECORDS_OFFSET + self._count % self._capacity * RECORD_BYTES, self._count + 1, row.start,
            row.end, row.train, row.tokens, row.peak_memory, row.flops, row.step, row.tags, row.loss, row.grad_norm, 0,
            STEP_KIND, 0,
        )  # fmt: skip
        self._count = self._words[COUNT] = self._count + 1

    def _string(self, text: str) -> int:
        """Return the index of a string; OTHER_STRING if the table is full."""
        if (index := self._strings.get(text)) is not None:
            return index
        index = len(self._strings)
        if index >= STRINGS:
            return OTHER_STRING
        data = text.encode()[: STRING_BYTES - 1]
        start = STRINGS_OFFSET + index * STRING_BYTES
        self._memory[start : start + len(data)] = data
        self._strings[text] = index
        self._words[STRING_COUNT] = index + 1
        return index


_pack_event = EVENT.pack_into


def open_event_ring(path: Path, identity: RingIdentity, capacity: int = CAPACITY_RECORDS) -> EventRing:
    """Begin the ring of this process in a new file. Raises: OSError, also if shared memory is full"""
    return EventRing(map_new_file(path, RECORDS_OFFSET + capacity * RECORD_BYTES), identity)
