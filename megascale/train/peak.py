"""The peak FLOP/s that a run's MFU is measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megascale.account.peaks import Peak, stated_peak
from megascale.comm.mesh import Mesh
from megascale.comm.totals import sum_over_job
from megascale.device import Device
from megascale.ops.gemm_rate import gemm_rate

if TYPE_CHECKING:
    from megascale.train.build import Run

ROUNDS = 3
"""Measurements, each by all ranks at once."""


def find_peak(run: Run) -> Peak | None:
    """Return the maker's figure for a GPU, None if it is not known; on a CPU measure it, with all ranks of the job."""
    if run.device.is_cpu:
        return measured_peak(run.device, run.formats[0], run.mesh)
    return stated_peak(run.device.name, run.config.train.precision)


def measured_peak(device: Device, dtype: torch.dtype, mesh: Mesh) -> Peak:
    """Return the mean GEMM rate of ranks that measure at the same time, so that ranks on one core share its peak.

    The best of several rounds counts: whatever else the machine does can only lower the rate.
    """
    best = 0.0
    for _ in range(ROUNDS):
        mesh.world.control.barrier("the peak")
        total = torch.tensor([gemm_rate(device, dtype)], dtype=torch.float64, device=device.torch)
        sum_over_job(mesh, total)
        best = max(best, float(total))
    name = str(dtype).removeprefix("torch.")
    return Peak(best / mesh.world.size, f"{device.name} {name}, measured by GEMM")
