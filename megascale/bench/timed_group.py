"""Timing of communication among all ranks of an initialised job."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from megascale.bench.quartiles import intervals
from megascale.comm.mesh import Mesh, open_mesh
from megascale.comm.totals import device_barrier, max_over_job
from megascale.device import Device
from megascale.layout.topology import Topology
from megascale.record.recorder import Recorder

TIMING_S = 2e-3
"""Minimum seconds of a timed group of operations: above a clock's resolution, below a scheduler's time slice."""


def open_ranks(topology: Topology, rank: int, device: Device) -> Mesh:
    """Open the mesh of a rank, without a record of its communication."""
    return open_mesh(topology, rank, tied=False, recorder=Recorder(device.timer(), enabled=False))


def time_together(work: Callable[[], object], mesh: Mesh, device: Device, repeats: int) -> list[float]:
    """Time `work`, in which every rank takes part, `repeats` times; return this rank's seconds."""
    seconds: list[float] = []
    group = 1
    for number in range(repeats + 2):  # 0 warms up, 1 determines the group
        device_barrier(mesh, device.torch_device)
        timer = device.timer()
        marks = [timer.mark()]
        for _ in range(group):
            work()
        marks.append(timer.mark())
        device.synchronize()
        (passed,) = intervals(timer, marks)
        if number == 1:
            once = torch.tensor([passed], dtype=torch.float64, device=device.torch_device)
            max_over_job(mesh, once)  # every rank must take the same number of calls
            group = max(1, math.ceil(TIMING_S / float(once)))
        elif number > 1:
            seconds.append(passed / group)
    return seconds
