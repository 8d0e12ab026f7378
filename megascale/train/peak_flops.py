"""The peak FLOP/s in the denominator of a run's MFU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megascale.catalog.accelerators import Peak, stated_peak
from megascale.comm.mesh import Mesh
from megascale.comm.totals import device_barrier, sum_over_job
from megascale.core.process import usable_cores
from megascale.core.rank import local_world_size
from megascale.device import Device

if TYPE_CHECKING:
    from megascale.train.run import Run

ROUNDS = 3  # rounds of measurement; all ranks measure at the same time
ROUND_S = 0.02  # of each, with a core for each rank
CROWDED_ROUND_S = 0.1  # with more ranks than cores: ranks take turns of some milliseconds


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

    best, crowded = 0.0, local_world_size(default=1) > usable_cores()
    device_barrier(mesh, device.torch_device)  # the sum of a round is the barrier before the next
    for _ in range(ROUNDS):
        rate = gemm_rate(device, dtype, CROWDED_ROUND_S if crowded else ROUND_S)
        total = torch.tensor([rate], dtype=torch.float64, device=device.torch_device)
        sum_over_job(mesh, total)
        best = max(best, float(total))
    name = str(dtype).removeprefix("torch.")
    return Peak(best / mesh.world.size, f"{device.name} {name}, measured by GEMM")
