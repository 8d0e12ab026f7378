"""A copy of a rank's state in memory that it shares with another process."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.core.errors import CheckpointError
from megascale.device import Device

ALIGNMENT = 64
"""Bytes at whose multiples tensors begin."""


class Snapshot:
    """Room for the numbers of flat, contiguous `tensors`, which is taken and touched once and then used again.

    `descriptor`: of the memory, which another process may map. Raises: CheckpointError if there is not enough memory.
    """

    def __init__(self, tensors: Sequence[Tensor], device: Device) -> None:
        self._device = device
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        self._starts: list[int] = []
        size = 0
        for tensor in self._tensors:
            self._starts.append(size)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.descriptor = os.memfd_create("megascale-checkpoint")
        try:
            os.posix_fallocate(self.descriptor, 0, max(size, 1))
        except OSError as error:
            os.close(self.descriptor)
            what = f"no memory for a copy of {size} bytes of state: {error.strerror}"
            raise CheckpointError(what, mend="checkpoint.every=0, or hosts with more memory") from None
        self._memory = mmap.mmap(self.descriptor, max(size, 1), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._copies = [
            torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            for tensor, start in zip(self._tensors, self._starts, strict=True)
        ]

    def take(self) -> None:
        """Copy the tensors as they are now."""
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            copy.copy_(tensor.view(-1), non_blocking=True)
        self._device.synchronize()

    def place(self, part: Tensor) -> int:
        """Where the copy of a contiguous part of one of the tensors begins."""
        for tensor, start in zip(self._tensors, self._starts, strict=True):
            offset = part.data_ptr() - tensor.data_ptr()
            if offset >= 0 and offset + part.nbytes <= tensor.nbytes:
                return start + offset
        raise ValueError("not a part of these tensors")
