"""The rate at which one device multiplies square matrices: the peak of processors whose makers state none."""

from __future__ import annotations

import time

import torch

from megascale.device import Device

SIZE = 768
"""Width of the matrices: large enough to reach the rate, small enough to stay in a core's cache."""

GROUP = 4
"""GEMMs between two looks at the clock."""


def gemm_rate(device: Device, dtype: torch.dtype, seconds: float = 0.1) -> float:
    """Measure FLOP/s of square GEMMs over about `seconds` of wall clock, during which others may use the same core."""
    a = torch.rand(SIZE, SIZE, dtype=torch.float32, device=device.torch).to(dtype)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    device.synchronize()
    count = 0
    start = time.perf_counter()
    while time.perf_counter() < start + seconds:
        for _ in range(GROUP):
            torch.mm(a, a, out=out)
        device.synchronize()
        count += GROUP
    return count * 2 * SIZE**3 / (time.perf_counter() - start)
