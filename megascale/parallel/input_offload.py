"""Offload of block inputs to host memory behind compute (ALST, Bekman et al. 2025; vDNN, Rhu et al. 2016).

With full recomputation a block saves its input X alone. Its copy leaves while the block computes, and comes back while
the next block's backward runs, one block ahead:

    forward   compute  | block 1  | block 2  |             backward  compute  | block 2  | block 1  |
              save     | X of 1   | X of 2   |                       load     | X of 1   |

A buffer is read and freed in the order in which work is issued to the device, and four orderings hold that together:

    a save starts after the work issued before it      which writes X
    later work waits for the save before X is freed    and its memory is reused, for it or another tensor
    a load starts after the work issued before it      which may still use the memory that it fills
    later work waits for the load                      before it reads X, and before another save reuses host memory

On the device are at most the inputs of two blocks in forward, and of three in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megascale.device import HostBuffers, Wait


@dataclass
class OffloadedInput:
    """A block's input in `host` memory. `before`: that of the block before it, in the same micro-batch and chunk. `x`:
    the input on the device, while it leaves and once it is on its way back, and `copied`, the wait for that copy.
    """

    shape: torch.Size
    dtype: torch.dtype
    host: Tensor
    before: OffloadedInput | None
    x: Tensor | None
    copied: Wait


class ActivationOffload:
    """The block inputs of a rank in host memory, whose buffers are reused by later micro-batches.

    `count` inputs of up to `nbytes` are kept at once. Their buffers are allocated here, before the first step: CUDA may
    wait for the device to pin memory, and in a step the device may be waiting for other ranks.
    """

    def __init__(self, buffers: HostBuffers, count: int = 0, nbytes: int = 0) -> None:
        self._buffers = buffers
        self._free = [buffers.allocate(nbytes) for _ in range(count)]
        self._largest = nbytes
        self._leaving: OffloadedInput | None = None
        self._last: OffloadedInput | None = None

    def store(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to save a block's input; the returned function, for the block's backward, gives it back once."""
        x = x.detach()
        if self._leaving is not None:  # the block before it has been issued, and hides its save
            self._leaving.copied()
            self._leaving.x = None
        host = self._host_buffer(x.nbytes)
        stored = OffloadedInput(x.shape, x.dtype, host, self._last, x, self._buffers.save(x, host))
        self._leaving = self._last = stored
        return partial(self._take, stored)

    def end_forward(self) -> OffloadedInput | None:
        """Return the last input stored since the forward before this one, for `fetch`; None if there is none."""
        last, self._last = self._last, None
        return last

    def fetch(self, stored: OffloadedInput) -> None:
        """Start to load an input, unless it is on the device."""
        if stored.x is None:
            stored.x, stored.copied = self._buffers.load(stored.host, stored.shape, stored.dtype)

    def _take(self, stored: OffloadedInput) -> Tensor:
        """Return an input, and start to load the one before it."""
        self.fetch(stored)
        if stored is self._leaving:
            self._leaving = None
        stored.copied()
        x, stored.x, before, stored.before = stored.x, None, stored.before, None
        assert x is not None, "an input is taken once"
        self._free.append(stored.host)
        if before is not None:
            self.fetch(before)
        return x

    def _host_buffer(self, nbytes: int) -> Tensor:
        """Return a free buffer, the smallest that fits, or a new one of the largest size so far: then few are made."""
        fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
        if not fitting:
            self._largest = max(self._largest, nbytes)
            return self._buffers.allocate(self._largest)
        smallest = min(fitting, key=lambda buffer: buffer.nbytes)
        self._free = [buffer for buffer in self._free if buffer is not smallest]
        return smallest
