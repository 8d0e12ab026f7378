"""A snapshot: a copy of a rank's state in memory shared with another process."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megascale.core.errors import CheckpointError
from megascale.core.limits import os_error_hint
from megascale.device import Device

ALIGNMENT = 64  # alignment of tensors in bytes


class Snapshot:
    """Shared memory of `size` bytes for copies of flat, contiguous `tensors`, pre-faulted and pinned once, then reused.

    `file`: a path in an in-memory file system, for a snapshot that outlives this process; a file of the right size
    keeps its contents. `path`: how a process that inherited `descriptor` opens the memory.

    Raises: CheckpointError if there is not enough memory
    """

    def __init__(self, tensors: Sequence[Tensor], device: Device, file: Path | None = None) -> None:
        self._device = device
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        self._starts: list[int] = []
        size = 0
        for tensor in self._tensors:
            self._starts.append(size)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.size = max(size, 1)
        self.descriptor = _allocate(file, self.size)
        self.path = f"/proc/self/fd/{self.descriptor}"
        self._memory = mmap.mmap(self.descriptor, self.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
        weakref.finalize(self, device.pin_memory(self.buffer)).atexit = False  # then CUDA may be gone
        self._copies = [
            self.buffer[start : start + tensor.nbytes].view(tensor.dtype)
            for tensor, start in zip(self._tensors, self._starts, strict=True)
        ]

    def copy_from_tensors(self) -> None:
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            copy.copy_(tensor.view(-1), non_blocking=True)
        self._device.synchronize()

    def copy_to_tensors(self) -> None:
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            tensor.view(-1).copy_(copy)
        self._device.synchronize()

    def offset_of(self, part: Tensor) -> int:
        """Return the byte offset of the copy of a contiguous part of a tensor."""
        for tensor, start in zip(self._tensors, self._starts, strict=True):
            offset = part.data_ptr() - tensor.data_ptr()
            if offset >= 0 and offset + part.nbytes <= tensor.nbytes:
                return start + offset
        raise ValueError("not a part of these tensors")


def _allocate(file: Path | None, size: int) -> int:
    """Allocate memory, in `file` if given, and return its descriptor."""
    try:
        if file is None:
            descriptor = os.memfd_create("megascale-checkpoint")
        else:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        what = f"no memory for a copy of {size} bytes of state{f' in {file}' if file else ''}: {error.strerror}"
        hint = os_error_hint(error, "use hosts with more memory")
        raise CheckpointError(what, hint=f"set checkpoint.in_memory_every=0 or every=0; or {hint}") from None
    return descriptor
