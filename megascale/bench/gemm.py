"""The rate of matrix products that a device attains: the peak of processors whose makers state none."""

from __future__ import annotations

import time

import torch

from megascale.comm.collectives import all_reduce, barrier
from megascale.comm.mesh import Mesh
from megascale.device import Device
from megascale.plan.hardware import Peak

SIZE = 768
"""Width of the square matrices: large enough to reach the rate, small enough to stay in a core's cache."""


ROUNDS = 3
"""Times that the ranks measure, together."""


def measure(device: Device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """FLOP/s of square products on this rank over about `seconds`, the time in which others had its core included."""
    a = torch.rand(SIZE, SIZE, dtype=torch.float32, device=device.torch).to(dtype)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    device.synchronize()
    count, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        for _ in range(4):
            torch.mm(a, a, out=out)
        device.synchronize()
        count += 4
    return count * 2 * SIZE**3 / (time.perf_counter() - start)


def measured_peak(device: Device, dtype: torch.dtype, mesh: Mesh) -> Peak:
    """The mean rate of all ranks that measure at the same time, so that ranks which share cores share their peak too.
    The best of some rounds: whatever else the machine does can only lower it.
    """
    best = 0.0
    for _ in range(ROUNDS):
        barrier(mesh.world)
        total = torch.tensor([measure(device, dtype)], dtype=torch.float64, device=device.torch)
        all_reduce(mesh.world, total)
        best = max(best, float(total))
    name = str(dtype).removeprefix("torch.")
    return Peak(best / mesh.world.size, f"{device.name} {name}, measured by GEMM")
