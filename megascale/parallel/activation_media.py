"""Where tensors are between forward and backward: in host memory (`HostMemory`) or in a file (`FileMemory`).

Both have a `MemoryPool` of pinned memory in pieces as large as the tensors, where torch's own sizes are powers of two
(MemAscend, Liaw and Chen 2025). A file is written and read by threads (SSDTrain, Wu et al. 2024):

    leave    device -> buffer by a stream, buffer -> file by the thread that writes, which then frees the buffer
    return   file -> buffer -> device by the thread that reads

A tensor that returns before its write has begun has never been in the file. The file has no name: the operating system
removes it when the process ends, however that happens.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from megascale.core.errors import MegascaleError
from megascale.device import HostBuffers, Wait

T = TypeVar("T", bound=Sized)

Loaded = tuple[Tensor, Wait]
"""A tensor on the device, and the wait before it is read."""


class SavedTensorError(MegascaleError):
    """A file of saved tensors that cannot be written or read."""


class MemoryPool(Generic[T]):
    """Pieces of memory, as long as their bytes, that are used again. `nbytes`: of all; `allocate`: makes one."""

    def __init__(self, allocate: Callable[[int], T]) -> None:
        self._allocate = allocate
        self.free = list[T]()  # by size
        self.nbytes = 0

    def take(self, nbytes: int) -> T:
        """Return the smallest free piece that fits, or else a new one in place of the largest free one."""
        at = bisect_left(self.free, nbytes, key=len)
        if at < len(self.free):
            return self.free.pop(at)
        if self.free:
            self.nbytes -= len(self.free.pop())
        self.nbytes += nbytes
        return self._allocate(nbytes)

    def give(self, piece: T) -> None:
        insort(self.free, piece, key=len)


@dataclass(eq=False)
class MovedTensor:
    """A flat tensor of `nbytes` bytes that is copied to a `piece` of host memory; `saved`: the wait for the copy. `x`:
    the tensor on the device, until it has left, and once it is back.
    """

    memory: HostMemory
    x: Tensor | None
    nbytes: int
    piece: Tensor | None
    saved: Wait
    _loading: Callable[[], Loaded] | None = field(default=None, init=False)

    def leave(self) -> None:
        """Have later work wait for the copy, and free the tensor on the device."""
        if self.x is not None:
            self.saved()
            self.x = None

    def fetch(self) -> None:
        """Start to load the tensor, unless it is on the device."""
        if self.x is None and self._loading is None:
            self._loading = self._load()

    def take(self) -> Tensor:
        """Return the tensor on the device."""
        self.fetch()
        if self._loading is not None:
            self.x, copied = self._loading()
            self._loading = None
            copied()
        assert self.x is not None, "a fetched tensor is on the device, or on its way"
        return self.x

    def _load(self) -> Callable[[], Loaded]:
        """Start to copy the tensor back; the returned function gives the result."""
        assert self.piece is not None, "the copy stays in host memory"
        loaded = self.memory.load(self.piece, self.nbytes)
        return lambda: loaded

    def _free_piece(self) -> None:
        if self.piece is not None:
            self.memory.pool.give(self.piece)
        self.piece = None

    def __del__(self) -> None:
        try:
            if self._loading is not None:  # and nothing has read it
                self.take()
            self.saved()
        finally:
            self._free_piece()


class HostMemory:
    """Copies in host memory. `pool`: of all, reused by later micro-batches."""

    def __init__(self, buffers: HostBuffers) -> None:
        self.buffers = buffers
        self.pool = MemoryPool(buffers.allocate)

    def save(self, x: Tensor) -> MovedTensor:
        """Start to copy flat x, after the work that was issued to the device before."""
        piece = self.pool.take(x.nbytes)
        return MovedTensor(self, x, x.nbytes, piece, self.buffers.save(x, piece[: x.nbytes]))

    def load(self, piece: Tensor, nbytes: int) -> Loaded:
        """Start to copy `nbytes` bytes back to the device: the tensor, u8, and the wait for it."""
        return self.buffers.load(piece[:nbytes])


@dataclass(eq=False)
class FiledTensor(MovedTensor):
    """A tensor that is copied to an `extent` of a file. The piece is its buffer, from the save to the end of `writing`,
    and from the load on.
    """

    memory: FileMemory
    extent: range
    writing: Future[None]

    def leave(self) -> None:
        """Also wait until the file has the tensor: buffers are those of two blocks."""
        if self.x is not None:
            self.writing.result()
            super().leave()
            self._free_piece()

    def _load(self) -> Callable[[], Loaded]:
        self.piece = self.memory.pool.take(self.nbytes)
        return self.memory.reader.submit(self.memory.read, self.piece, self.nbytes, self.extent.start).result

    def __del__(self) -> None:
        if not self.writing.cancel():
            self.writing.exception()  # a tensor that was needed again has raised it
        super().__del__()
        self.memory.extents.give(self.extent)


class FileMemory(HostMemory):
    """Copies in a file in `folder`, which grows to the bytes that are there at once. `written`: bytes so far."""

    def __init__(self, buffers: HostBuffers, folder: str) -> None:
        super().__init__(buffers)
        self.extents = MemoryPool(self._extend)
        self.written = self._end = 0
        self._folder = folder
        with self._telling("create a file of"):
            self._file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self.writer, self.reader = (ThreadPoolExecutor(1, f"saved tensors {work}") for work in ("out", "in"))

    def save(self, x: Tensor) -> FiledTensor:
        piece, extent = self.pool.take(x.nbytes), self.extents.take(x.nbytes)
        saved = self.buffers.read(x, piece[: x.nbytes])
        writing = self.writer.submit(self._write, saved, piece, x.nbytes, extent.start)
        return FiledTensor(self, x, x.nbytes, piece, saved, extent, writing)

    def read(self, piece: Tensor, nbytes: int, start: int) -> Loaded:
        """Read a tensor by way of a piece of host memory, and start to copy it to the device."""
        self._transfer("read", os.preadv, piece, nbytes, start)
        return self.load(piece, nbytes)

    def _write(self, saved: Wait, piece: Tensor, nbytes: int, start: int) -> None:
        saved()
        self._transfer("write", os.pwritev, piece, nbytes, start)
        self.written += nbytes

    def _transfer(
        self, what: str, move: Callable[[int, list[memoryview], int], int], piece: Tensor, nbytes: int, start: int
    ) -> None:
        """Read or write the first bytes of a piece, in as many calls as that takes."""
        rest = piece.numpy().data[:nbytes]
        with self._telling(what):
            while rest:
                count = move(self._file.fileno(), [rest], start + nbytes - len(rest))
                if not count:
                    raise OSError(0, f"the file ends {len(rest)} bytes too early")
                rest = rest[count:]

    def _extend(self, nbytes: int) -> range:
        """Return a new extent at the end of the file."""
        self._end += nbytes
        return range(self._end - nbytes, self._end)

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Say which folder an error is of, and what to do."""
        try:
            yield
        except OSError as error:
            hint = "free or repair the disk, set another train.memory_dir, or write host or full in train.memory"
            message = f"cannot {what} saved tensors in train.memory_dir = {self._folder}: {error.strerror}"
            raise SavedTensorError(message, hint=hint) from error
