"""Measured GEMM throughput of a device: its peak FLOP/s if the manufacturer states none."""

from __future__ import annotations

import time

import torch

from megascale.device import Device

SIZE = 768  # side of the matrices: large enough for full throughput, small enough for a core's cache
GROUP = 4  # GEMMs between two clock readings on a GPU. On a CPU a GEMM of a dtype that it emulates takes seconds


def gemm_rate(device: Device, dtype: torch.dtype, seconds: float = 0.1) -> float:
    """Measure FLOP/s of square GEMMs over about `seconds` of wall-clock time; other processes may share the core."""
    a = torch.rand(SIZE, SIZE, dtype=torch.float32, device=device.torch_device).to(dtype)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    device.synchronize()
    count, group = 0, 1 if device.is_cpu else GROUP
    start = time.perf_counter()
    while time.perf_counter() < start + seconds:
        for _ in range(group):
            torch.mm(a, a, out=out)
        device.synchronize()
        count += group
    return count * 2 * SIZE**3 / (time.perf_counter() - start)
