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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from megascale.core.errors import MegascaleError
from megascale.device import HostBuffers, Wait

T = TypeVar("T")

Loaded = tuple[Tensor, Wait]
"""A tensor on the device, and the wait before it is read."""


class TensorCopy(Protocol):
    """A copy of a tensor outside of the device."""

    def leave(self) -> None:
        """Have later work wait for the copy before the tensor on the device is freed."""

    def load(self) -> Callable[[], Loaded]:
        """Start to copy the tensor back; the returned function gives the result."""

    def free(self) -> None:
        """End the use of the copy's memory. If there was no `leave`, the tensor is still on the device."""


class Medium(Protocol):
    """Keeps copies of tensors."""

    def save(self, x: Tensor) -> TensorCopy:
        """Start to copy x, after the work that was issued to the device before."""


class SavedTensorError(MegascaleError):
    """A file of saved tensors that cannot be written or read."""


class PoolPiece(NamedTuple, Generic[T]):
    """A piece of memory of `nbytes`."""

    nbytes: int
    memory: T


class MemoryPool(Generic[T]):
    """Pieces of memory that are used again. `nbytes`: of all of them; `allocate`: makes the memory of one."""

    def __init__(self, allocate: Callable[[int], T]) -> None:
        self._allocate = allocate
        self.free = list[PoolPiece[T]]()  # by size
        self.nbytes = 0

    def take(self, nbytes: int) -> PoolPiece[T]:
        """Return the smallest free piece that fits, or else a new one in place of the largest free one."""
        at = bisect_left(self.free, nbytes, key=_size)
        if at < len(self.free):
            return self.free.pop(at)
        if self.free:
            self.nbytes -= self.free.pop().nbytes
        self.nbytes += nbytes
        return PoolPiece(nbytes, self._allocate(nbytes))

    def give(self, piece: PoolPiece[T]) -> None:
        insort(self.free, piece, key=_size)


def _size(piece: PoolPiece[T]) -> int:
    return piece.nbytes


class HostMemory:
    """Copies in host memory. `pool`: of all, reused by later micro-batches."""

    def __init__(self, buffers: HostBuffers) -> None:
        self.buffers = buffers
        self.pool = MemoryPool(buffers.allocate)

    def reserve(self, count: int, nbytes: int) -> None:
        """Allocate memory for `count` tensors of `nbytes` before the first step: CUDA may wait for the device to pin
        memory, and in a step the device may be waiting for other ranks.
        """
        for piece in [self.pool.take(nbytes) for _ in range(count)]:
            self.pool.give(piece)

    def save(self, x: Tensor) -> HostCopy:
        piece = self.pool.take(x.nbytes)
        return HostCopy(self, piece, x.shape, x.dtype, self.buffers.save(x, piece.memory))


@dataclass
class HostCopy:
    """A copy in host memory. `saved`: the wait for its save."""

    memory: HostMemory
    piece: PoolPiece[Tensor]
    shape: torch.Size
    dtype: torch.dtype
    saved: Wait

    def leave(self) -> None:
        self.saved()

    def load(self) -> Callable[[], Loaded]:
        loaded = self.memory.buffers.load(self.piece.memory, self.shape, self.dtype)
        return lambda: loaded

    def free(self) -> None:
        self.saved()
        self.memory.pool.give(self.piece)


class FileMemory:
    """Copies in a file in `folder`, which grows to the bytes that are there at once. `written`: bytes so far."""

    def __init__(self, buffers: HostBuffers, folder: str) -> None:
        self.buffers = buffers
        self.pool = MemoryPool(buffers.allocate)
        self.extents = MemoryPool(self._extend)
        self.written = 0
        self._folder, self._end = folder, 0
        try:
            self._file, path = tempfile.mkstemp(dir=folder)
            Path(path).unlink()
        except OSError as error:
            raise self._error("create a file of saved tensors", error) from error
        weakref.finalize(self, os.close, self._file)
        self.writer, self.reader = (ThreadPoolExecutor(1, f"saved tensors {work}") for work in ("out", "in"))

    def _extend(self, nbytes: int) -> int:
        """Return the first byte of a new extent of the file."""
        self._end += nbytes
        return self._end - nbytes

    def _error(self, what: str, error: OSError) -> SavedTensorError:
        hint = "free or repair the disk, set another train.memory_dir, or write host or full in train.memory"
        return SavedTensorError(f"cannot {what} in train.memory_dir = {self._folder}: {error.strerror}", hint=hint)

    def save(self, x: Tensor) -> FileCopy:
        piece, extent = self.pool.take(x.nbytes), self.extents.take(x.nbytes)
        saved = self.buffers.read(x, piece.memory)
        writing = self.writer.submit(self._write, saved, piece.memory, x.nbytes, extent.memory)
        return FileCopy(self, extent, x.shape, x.dtype, saved, piece, writing)

    def _write(self, saved: Wait, host: Tensor, nbytes: int, start: int) -> None:
        saved()
        rest = host.numpy().data[:nbytes]
        try:
            while rest:
                count = os.pwrite(self._file, rest, start + nbytes - len(rest))
                rest = rest[count:]
        except OSError as error:
            raise self._error("write saved tensors", error) from error
        self.written += nbytes

    def read(self, host: Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> Loaded:
        """Read a tensor by way of `host`, and start to copy it to the device."""
        nbytes = shape.numel() * dtype.itemsize
        rest = host.numpy().data[:nbytes]
        try:
            while rest:
                count = os.preadv(self._file, [rest], start + nbytes - len(rest))
                if not count:
                    raise OSError(0, f"the file ends {len(rest)} bytes too early")
                rest = rest[count:]
        except OSError as error:
            raise self._error("read saved tensors", error) from error
        return self.buffers.load(host, shape, dtype)


@dataclass
class FileCopy:
    """A copy in an extent of a file. `piece`: its buffer, from the save to the end of `writing`, and from the load."""

    memory: FileMemory
    extent: PoolPiece[int]
    shape: torch.Size
    dtype: torch.dtype
    saved: Wait
    piece: PoolPiece[Tensor] | None
    writing: Future[None]

    def leave(self) -> None:
        """Also wait until the file has the tensor: buffers are those of two blocks."""
        self.saved()
        self.writing.result()
        assert self.piece is not None, "a tensor leaves once"
        self.memory.pool.give(self.piece)
        self.piece = None

    def load(self) -> Callable[[], Loaded]:
        self.piece = self.memory.pool.take(self.shape.numel() * self.dtype.itemsize)
        place = self.piece.memory, self.extent.memory, self.shape, self.dtype
        return self.memory.reader.submit(self.memory.read, *place).result

    def free(self) -> None:
        self.saved()
        if not self.writing.cancel():
            self.writing.exception()  # a tensor that was needed again has raised it
        if self.piece is not None:
            self.memory.pool.give(self.piece)
        self.memory.extents.give(self.extent)
