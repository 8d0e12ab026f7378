"""Thread blocks of a GPU that spin for a while, as NCCL's kernels do that wait for their peers."""

from __future__ import annotations

from typing import Any

import torch

from megascale.device import Device

THREADS, SHARED = 512, 40 << 10
"""Threads and bytes of shared memory of a block, about those of NCCL's."""

SOURCE = r"""
extern "C" __global__ void spin(int microseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < 1000ull * microseconds);
}
"""


class Spin:
    """A kernel in a stream of its own. On a CPU nothing spins."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.end: Any = None
        if not device.is_cpu:
            self._stream = torch.cuda.Stream(device.torch_device)
            self._kernel: Any = torch.cuda._compile_kernel(SOURCE, "spin")
            self.start(1, 1e-3)  # loads the kernel
            device.synchronize()

    def start(self, blocks: int, seconds: float) -> None:
        """Start to spin; `end` is the event of its end."""
        if self._device.is_cpu:
            return
        self._kernel((blocks, 1, 1), (THREADS, 1, 1), [int(seconds * 1e6)], SHARED, self._stream)
        self.end = torch.cuda.Event()
        self.end.record(self._stream)

    def runs(self) -> bool:
        """Return True until the last spin has ended."""
        return self.end is not None and not self.end.query()
