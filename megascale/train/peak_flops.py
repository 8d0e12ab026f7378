"""The peak FLOP/s in the denominator of a run's MFU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megascale.catalog.accelerators import Peak, stated_peak
from megascale.comm.mesh import Mesh
from megascale.comm.totals import device_barrier, sum_over_job
from megascale.device import Device

if TYPE_CHECKING:
    from megascale.train.run import Run

ROUNDS = 3  # rounds of measurement; all ranks measure at the same time


def find_peak_flops(run: Run) -> Peak | None:
    """Return a GPU's peak from the data sheet, or None for an unknown GPU. On a CPU, measure the peak on all ranks."""
    if run.device.is_cpu:
        return measure_peak_flops(run.device, run.dtypes[0], run.mesh)
    return stated_peak(run.device.name, run.config.train.precision)


def measure_peak_flops(device: Device, dtype: torch.dtype, mesh: Mesh) -> Peak:
    """Measure the mean GEMM rate in FLOP/s of all ranks at the same time, because ranks may share cores.

    The best round counts, since other load can only lower the rate.
    """
    from megascale.ops.gemm_rate import gemm_rate

    best = 0.0
    device_barrier(mesh, device.torch_device)  # the sum of a round is the barrier before the next
    for _ in range(ROUNDS):
        total = torch.tensor([gemm_rate(device, dtype)], dtype=torch.float64, device=device.torch_device)
        sum_over_job(mesh, total)
        best = max(best, float(total))
    name = str(dtype).removeprefix("torch.")
    return Peak(best / mesh.world.size, f"{device.name} {name}, measured by GEMM")
