"""The reader of a rank's event ring: drains the records that were written since the last call, and counts those that
were overwritten before. A reader needs no help of the rank, which may be stopped or gone, and disturbs no other reader.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.core import event_ring as ring
from megascale.core.errors import MegascaleError
from megascale.core.shared_file import open_for_reading

if TYPE_CHECKING:
    import numpy as np

EVENT_FIELDS = (
    ("number", "<i8"), ("issue", "<f8"), ("start", "<f8"), ("end", "<f8"), ("exposed", "<f8"), ("bytes", "<i8"),
    ("sequence", "<i8"), ("step", "<i4"), ("microbatch", "<i4"), ("peer", "<i4"), ("layer", "<i2"), ("stage", "<i2"),
    ("chunk", "<i2"), ("axis", "<u2"), ("name", "<u2"), ("part", "<u2"), ("group_name", "<u2"), ("direction", "<u2"),
    ("kind", "<u2"), ("unused", "<u2"),
)  # fmt: skip
"""Fields of an event's record. Texts are indices of the ring's strings."""

STEP_FIELDS = (
    ("number", "<i8"), ("start", "<f8"), ("end", "<f8"), ("train", "<f8"), ("tokens", "<i8"), ("peak_memory", "<i8"),
    ("flops", "<f8"), ("step", "<i4"), ("tags", "<u4"), ("loss", "<f8"), ("grad_norm", "<f8"), ("unused", "<u4"),
    ("kind", "<u2"), ("unused_2", "<u2"),
)  # fmt: skip
"""Fields of a step's record."""


class EventRingError(MegascaleError):
    """A file that is not, or not yet, an event ring."""


@dataclass(frozen=True)
class RingHead:
    """The head of a ring. `ready`: the fields from `epoch_ns` on are known, and `attempt` is that of the store."""

    rank: int
    world: int
    pid: int
    attempt: int
    start_ns: int
    ready: bool
    epoch_ns: int
    coord: dict[str, int]
    peak_flops: int


@dataclass(frozen=True)
class Drained:
    """Records since the last call, in the order of their writes: structured arrays of EVENT_FIELDS and STEP_FIELDS.
    `lost`: records that were overwritten before they were read.
    """

    events: np.ndarray
    steps: np.ndarray
    lost: int


class EventRingReader:
    """Reads the ring in the file at `path`, also after the file was removed.

    Raises: OSError; EventRingError
    """

    def __init__(self, path: Path) -> None:
        descriptor = open_for_reading(path)
        try:
            size = os.fstat(descriptor).st_size
            self._memory = mmap.mmap(descriptor, size, prot=mmap.PROT_READ) if size >= ring.RECORDS_OFFSET else None
        finally:
            os.close(descriptor)
        if self._memory is None or self._word(ring.MAGIC_WORD) != ring.MAGIC:
            raise EventRingError(f"{path}: not an event ring, or its rank has not begun it")
        if self._word(ring.FORMAT_WORD) != ring.FORMAT:
            raise EventRingError(f"{path}: an event ring of format {self._word(ring.FORMAT_WORD)}, not {ring.FORMAT}")
        self._capacity = (size - ring.RECORDS_OFFSET) // ring.RECORD_BYTES
        self._next = 0

    def _word(self, place: int) -> int:
        assert self._memory is not None
        return int.from_bytes(self._memory[place * ring.WORD : (place + 1) * ring.WORD], "little", signed=True)

    @property
    def pid(self) -> int:
        """Id of the rank's process."""
        return self._word(ring.PID)

    @property
    def head(self) -> RingHead:
        """The head as of now."""
        return RingHead(
            self._word(ring.RANK),
            self._word(ring.WORLD),
            self._word(ring.PID),
            self._word(ring.ATTEMPT),
            self._word(ring.START),
            bool(self._word(ring.READY)),
            self._word(ring.EPOCH),
            {
                "tp": self._word(ring.TP),
                "cp": self._word(ring.CP),
                "dp": self._word(ring.DP),
                "pp": self._word(ring.PP),
            },
            self._word(ring.PEAK_FLOPS),
        )

    @property
    def note(self) -> dict[str, Any]:
        """The text of the ring for its readers."""
        assert self._memory is not None
        text = self._memory[ring.NOTE_OFFSET : ring.STRINGS_OFFSET].rstrip(b"\0")
        try:
            return dict(json.loads(text))
        except ValueError:
            raise EventRingError("the note of an event ring is damaged") from None

    def strings(self) -> list[str]:
        """Return the strings in use."""
        assert self._memory is not None
        count = min(max(0, self._word(ring.STRING_COUNT)), ring.STRINGS)
        starts = range(ring.STRINGS_OFFSET, ring.STRINGS_OFFSET + count * ring.STRING_BYTES, ring.STRING_BYTES)
        texts = (self._memory[start : start + ring.STRING_BYTES] for start in starts)
        return [text.split(b"\0", 1)[0].decode(errors="replace") for text in texts]

    def drain(self) -> Drained:
        """Return the records that were written since the last call."""
        import numpy as np

        count = self._word(ring.COUNT)
        first = max(self._next, count - self._capacity)
        numbers = np.arange(first + 1, count + 1)
        records = np.frombuffer(self._copy(first, count), list(EVENT_FIELDS))
        # the record after the last complete one may be under way, in the place of one that was copied
        oldest = self._word(ring.COUNT) + 1 - self._capacity
        whole = (records["number"] == numbers) & (numbers > oldest)
        lost = count - self._next - int(whole.sum())
        self._next = count
        records = records if whole.all() else records[whole]
        steps = records["kind"] == ring.STEP_KIND
        return Drained(records[~steps], records[steps].view(list(STEP_FIELDS)), lost)

    def _copy(self, first: int, end: int) -> bytes:
        """Copy the bytes of records `first` to `end` - 1, counted from 0."""
        assert self._memory is not None
        place, number = first % self._capacity, end - first
        before = min(number, self._capacity - place)
        spans = ((place, place + before), (0, number - before))
        ends = [[ring.RECORDS_OFFSET + index * ring.RECORD_BYTES for index in span] for span in spans]
        return b"".join(self._memory[start:stop] for start, stop in ends)
