"""The memory that the reader of a host shares with the ranks there: a ring of steps for each split. No torch.

ReaderShape: the ranks of a host with samples to read, and the bytes of their memory. ReaderMemory, Ring: the memory:

    head       numbers of 8 bytes: length of the failure's text; by split the beats of the reader, by which it shows
               that it does not hang, its thread while it opens datasets, and the end of the run's samples
    failure    text: why there is no reader any more
    readings   for each split a text: the sample that the reader reads
    weights    of a mixture that a data policy changes: how often they were written, and two places for them in turn
    rings      for each split: the steps that are filled; for each rank: the position that it has requested, the steps
               that it has released; each number with the generation that it belongs to, in one word
    slots      for each split `depth` steps: position, then a record for each sample, or an error

A generation begins with a rank's request to read from another position, and is the reader's once all ranks have
requested it. Within it, step n lies in slot n % depth from when `filled` is above n until every rank has released it.

The memory has no name in a file system, so that no end of a process leaves it behind. It is read and written as a file,
not mapped: the kernel orders the accesses on every processor, a rank copies a sample once either way, and lack of
memory is an error, not a signal. What a killed reader has left can be continued at any moment: a step counts once
`filled` says so, which is written last.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megascale.config.data import dataset_prefixes
from megascale.core.errors import DataError
from megascale.core.limits import os_error_hint
from megascale.data.host_reader.sample_record import record_bytes
from megascale.data.mix.batch_shape import BatchShape, reads_samples
from megascale.data.mix.data_policy import numbers
from megascale.data.mix.mixture_spec import MixtureSpec
from megascale.layout.topology import Topology

WORD = 8
FAILURE_LENGTH, BEATS, OPENER, END = 0, 1, 4, 7
"""Places of the head's numbers; the beats, thread and end of each split have a place of their own. END: samples of the
run, after which no step follows, 0 if no rank has said; OPENER: native id of the reader's thread while it opens
datasets, else 0; BEATS do not change while a reader hangs.
"""

FAILURE_OFFSET, FAILURE_BYTES = 128, 3968
READING_OFFSET, READING_BYTES = FAILURE_OFFSET + FAILURE_BYTES, 1024
MOST_SPLITS = 3
RINGS_OFFSET = READING_OFFSET + 4 * READING_BYTES

_SLOT_HEAD = struct.Struct("<qq8x")
"""Position of a step, and bytes of the error of the first sample that could not be read, 0 without one."""

PROCESS_BYTES = 64 << 20
"""Memory of the reader's process without samples; 51 MB are measured after its imports, 21 of them of files."""

_PAGE = 4096

ERROR_BYTES = _PAGE  # most bytes of an error in place of a step's records
_COUNT_BITS = 43  # bits of a number that stands beside its generation in a word


class Stamped(NamedTuple):
    """A number and the generation that it belongs to: written and read at once."""

    generation: int
    number: int

    @classmethod
    def from_word(cls, word: int) -> Stamped:
        return cls(word >> _COUNT_BITS, word & ((1 << _COUNT_BITS) - 1))

    @property
    def word(self) -> int:
        assert self.number >> _COUNT_BITS == 0, f"{self.number} takes more than {_COUNT_BITS} bits"
        return self.generation << _COUNT_BITS | self.number


class RankRequest(NamedTuple):
    """The request of a rank: its generation, the position of the first step, and the steps that it has read."""

    generation: int
    position: int
    released: int


@dataclass(frozen=True)
class MemoryShape:
    """The sizes of the memory: splits, ranks that read, steps of a ring, samples of a step, bytes of a record, and
    numbers of the weights of a changing mixture.
    """

    splits: int
    ranks: int
    depth: int
    rows: int
    record_bytes: int
    weights: int = 0

    @property
    def ring_bytes(self) -> int:
        return WORD * (1 + 2 * self.ranks)

    @property
    def slot_bytes(self) -> int:
        return -(-(_SLOT_HEAD.size + max(self.rows * self.record_bytes, ERROR_BYTES)) // _PAGE) * _PAGE

    @property
    def weights_offset(self) -> int:
        return RINGS_OFFSET + self.splits * self.ring_bytes

    @property
    def slots_offset(self) -> int:
        return -(-(self.weights_offset + WORD * (1 + 2 * self.weights)) // _PAGE) * _PAGE

    @property
    def bytes(self) -> int:
        return self.slots_offset + self.splits * self.depth * self.slot_bytes


@dataclass(frozen=True)
class ReaderShape:
    """The `ranks` of a host that read samples, their data-parallel `replicas`, and the `rows` of a step that they need;
    `memory`: of their reader.
    """

    ranks: list[int]
    replicas: list[int]
    rows: list[int]
    memory: MemoryShape

    @property
    def bytes(self) -> int:
        """Host memory of the reader: it shares some with the ranks, and has samples of a step and its own beside."""
        return self.memory.bytes + len(self.rows) * self.memory.record_bytes + PROCESS_BYTES


def reader_shape(
    spec: MixtureSpec, shape: BatchShape, topology: Topology, token_ranks: Collection[int], ranks: Sequence[int],
    splits: int,
) -> ReaderShape:  # fmt: skip
    """Describe the reader of a host with these `ranks` of a job, for training (`spec`), in steps of `shape`, and
    perhaps evaluations (`splits`). `token_ranks`: the pipeline ranks that need tokens.
    """
    data = spec.data
    readers = [rank for rank in ranks if reads_samples(data.attention_mask, token_ranks, topology.coord(rank).pp)]
    replicas = sorted({topology.coord(rank).dp for rank in readers})
    rows = shape.rows_of(replicas)
    weights = numbers(len(dataset_prefixes(data.train))) if data.blend_policy else 0
    memory = MemoryShape(splits, len(readers), data.prefetch, len(rows), record_bytes(spec.seq_length), weights)
    return ReaderShape(readers, replicas, rows, memory)


@dataclass(frozen=True)
class ReaderMemory:
    """The memory at an open descriptor, of a shape that reader and ranks know."""

    descriptor: int
    shape: MemoryShape

    @classmethod
    def allocate(cls, shape: MemoryShape) -> ReaderMemory:
        """Raises: DataError without enough memory"""
        descriptor = None
        try:
            descriptor = os.memfd_create("megascale-reader")
            os.fchmod(descriptor, 0o600)
            os.posix_fallocate(descriptor, 0, shape.bytes)
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            what = f"{shape.bytes} bytes of memory for the samples of this host cannot be had"
            reason = os_error_hint(error, str(error.strerror))
            raise DataError(f"{what}: {reason}", hint='fewer data.prefetch, or data.reader = "rank"') from None
        return cls(descriptor, shape)

    def ring(self, split: int) -> Ring:
        return Ring(self.descriptor, self.shape, split)

    def write_weights(self, numbers: Sequence[float]) -> None:
        """Write the weights of the training data's mixture, which hold for steps that no rank has released yet."""
        offset, written = self.shape.weights_offset, self.weights_written
        place = offset + WORD * (1 + written % 2 * self.shape.weights)
        os.pwrite(self.descriptor, struct.pack(f"<{self.shape.weights}d", *numbers), place)
        _set(self.descriptor, offset, written + 1)

    @property
    def weights_written(self) -> int:
        return _numbers(self.descriptor, self.shape.weights_offset, 1)[0]

    def weights(self) -> tuple[float, ...]:
        """The weights that were written last. They change once in many steps: never twice while they are read."""
        place = self.shape.weights_offset + WORD * (1 + (self.weights_written - 1) % 2 * self.shape.weights)
        return struct.unpack(f"<{self.shape.weights}d", os.pread(self.descriptor, WORD * self.shape.weights, place))

    def fail(self, text: str) -> None:
        data = text.encode()[:FAILURE_BYTES]
        os.pwrite(self.descriptor, data, FAILURE_OFFSET)
        _set(self.descriptor, WORD * FAILURE_LENGTH, len(data))

    @property
    def failure(self) -> str:
        """Why there is no reader any more; "" while there is one."""
        length = _numbers(self.descriptor, WORD * FAILURE_LENGTH, 1)[0]
        return os.pread(self.descriptor, length, FAILURE_OFFSET).decode(errors="replace")


class Ring:
    """The ring of a split."""

    def __init__(self, descriptor: int, shape: MemoryShape, split: int) -> None:
        assert split < MOST_SPLITS
        self._descriptor = descriptor
        self._shape = shape
        self._split = split
        self._words = RINGS_OFFSET + split * shape.ring_bytes
        self._slots = shape.slots_offset + split * shape.depth * shape.slot_bytes

    @property
    def filled(self) -> Stamped:
        """The number of steps that the reader has filled, in its generation."""
        return Stamped.from_word(_numbers(self._descriptor, self._words, 1)[0])

    def requests(self) -> list[RankRequest]:
        words = _numbers(self._descriptor, self._words + WORD, 2 * self._shape.ranks)
        numbers = [Stamped.from_word(word) for word in words]
        return [
            RankRequest(*request, released.number if released.generation == request.generation else 0)
            for request, released in zip(numbers[::2], numbers[1::2], strict=True)
        ]

    def get(self, place: int) -> int:
        """The split's number at a place of the head."""
        return _numbers(self._descriptor, WORD * (place + self._split), 1)[0]

    def set(self, place: int, number: int) -> None:
        _set(self._descriptor, WORD * (place + self._split), number)

    @property
    def reading(self) -> str:
        """The sample that the reader has begun to read."""
        text = os.pread(self._descriptor, READING_BYTES, READING_OFFSET + self._split * READING_BYTES)
        return text.rstrip(b"\0").decode(errors="replace")

    def request(self, rank: int, generation: int, position: int) -> None:
        """Begin a generation on a rank, by its number among those that read."""
        _set(self._descriptor, self._words + WORD * (1 + 2 * rank), Stamped(generation, position).word)

    def release(self, rank: int, generation: int, steps: int) -> None:
        """Note that a rank has read `steps` steps of a generation."""
        _set(self._descriptor, self._words + WORD * (2 + 2 * rank), Stamped(generation, steps).word)

    def beat(self, reading: str = "") -> None:
        """Show that the reader does not hang. `reading`: the sample to be read next."""
        if reading:
            text = reading.encode()[:READING_BYTES].ljust(READING_BYTES, b"\0")
            os.pwrite(self._descriptor, text, READING_OFFSET + self._split * READING_BYTES)
        self.set(BEATS, self.get(BEATS) + 1)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Note that this thread opens datasets in the block; its processor times tell the supervisor of its work."""
        self.set(OPENER, threading.get_native_id())
        try:
            yield
        finally:
            self.set(OPENER, 0)

    def begin(self, generation: int) -> None:
        """Begin a generation in the reader, of which no step is filled."""
        _set(self._descriptor, self._words, Stamped(generation, 0).word)

    def fill(self, number: int, position: int, records: Sequence[bytes], error: bytes = b"") -> None:
        """Fill step `number` of the generation with its records, or with an error."""
        start = self._slot(number)
        for place, record in enumerate(records):
            os.pwrite(self._descriptor, record, start + _SLOT_HEAD.size + place * self._shape.record_bytes)
        assert len(error) <= ERROR_BYTES
        os.pwrite(self._descriptor, error, start + _SLOT_HEAD.size)
        os.pwrite(self._descriptor, _SLOT_HEAD.pack(position, len(error)), start)
        _set(self._descriptor, self._words, Stamped(self.filled.generation, number + 1).word)

    def step(self, number: int) -> tuple[int, bytes]:
        """The position of a filled step, and its error; empty without one."""
        start = self._slot(number)
        position, length = _SLOT_HEAD.unpack(os.pread(self._descriptor, _SLOT_HEAD.size, start))
        return position, os.pread(self._descriptor, length, start + _SLOT_HEAD.size) if length else b""

    def record(self, number: int, place: int) -> bytes:
        """The record of a sample of a filled step, by its place among those of this host."""
        size = self._shape.record_bytes
        return os.pread(self._descriptor, size, self._slot(number) + _SLOT_HEAD.size + place * size)

    def _slot(self, number: int) -> int:
        return self._slots + number % self._shape.depth * self._shape.slot_bytes


def _numbers(descriptor: int, offset: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}q", os.pread(descriptor, WORD * count, offset))


def _set(descriptor: int, offset: int, number: int) -> None:
    os.pwrite(descriptor, struct.pack("<q", number), offset)
