"""Job-wide reductions: an all-reduce over all ranks in a small job, axis by axis in a large job.

- `sum_over_job`, `max_over_job`: reductions of a few values
- `broadcast_bytes`, `device_barrier`

Every rank gets the same bits, as the coefficient of gradient clipping needs. An all-reduce guarantees equal bits within
a group only; parallel groups may round differently. So the widest axis, data parallelism, is all-reduced first; then
the partial sums, equal on the axis's ranks, are all-gathered over tp and pp and added in rank order everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.comm.collectives import all_gather, all_reduce
from megascale.comm.mesh import Mesh


def sum_over_job(mesh: Mesh, values: Tensor, *, label: str = "") -> None:
    """Sum a few contiguous `values` over all ranks, in place."""
    first, *remaining = mesh.reduction_groups
    all_reduce(first, values, label=label)
    for group in remaining:
        if group.size > 1:
            parts = values.new_empty(group.size * values.numel())
            all_gather(group, parts, values.view(-1), label=label)
            values.copy_(parts.view(group.size, *values.shape).sum(0, dtype=values.dtype))


def max_over_job(mesh: Mesh, values: Tensor, *, label: str = "") -> None:
    """Reduce a few contiguous `values` to their maxima over all ranks, in place."""
    for group in mesh.reduction_groups:
        all_reduce(group, values, "max", label=label)


def broadcast_bytes(mesh: Mesh, data: bytes, device: torch.device) -> bytes:
    """Return rank 0's `data` on every rank; other ranks' `data` is ignored. The size goes through the store."""
    size = mesh.world.control.broadcast(len(data), "size")
    buffer = torch.zeros(size, dtype=torch.uint8)
    if mesh.rank == 0 and size:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    buffer = buffer.to(device)
    max_over_job(mesh, buffer, label="broadcast bytes")  # other ranks have zeros
    return buffer.cpu().numpy().tobytes()


def device_barrier(mesh: Mesh, device: torch.device) -> None:
    """Return at nearly the same time on every rank, after the device's issued work: a barrier for measurements."""
    ready = torch.zeros(1, device=device)
    sum_over_job(mesh, ready, label="barrier")
    ready.cpu()
