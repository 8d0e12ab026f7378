"""Sums and maxima over the whole job: one collective in a small job, else over one axis after the other.

Every rank gets the same bits, which the factor that clips gradients must have: a reduction gives them to one group, and
groups side by side may round differently. So the widest axis, data parallelism, is reduced first, and the partial sums,
equal on all of its ranks, are gathered over the two others and added in rank order everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.comm.collectives import all_gather, all_reduce
from megascale.comm.mesh import Mesh


def sum_over_job(mesh: Mesh, values: Tensor, *, what: str = "") -> None:
    """Sum a few `values`, contiguous, over all ranks, in place."""
    first, *others = mesh.sums
    all_reduce(first, values, what=what)
    for group in others:
        if group.size > 1:
            parts = values.new_empty(group.size * values.numel())
            all_gather(group, parts, values.view(-1), what=what)
            values.copy_(parts.view(group.size, *values.shape).sum(0, dtype=values.dtype))


def max_over_job(mesh: Mesh, values: Tensor, *, what: str = "") -> None:
    """The largest of each of a few `values`, contiguous, over all ranks, in place; in any order that is the same."""
    for group in mesh.sums:
        all_reduce(group, values, "max", what=what)


def spread(mesh: Mesh, data: bytes, device: torch.device) -> bytes:
    """The first rank's bytes, on every rank, however many: the others' count for nothing. They meet once in the store,
    for the size.
    """
    size = mesh.world.control.broadcast(len(data), "size")
    room = torch.zeros(size, dtype=torch.uint8)
    if mesh.rank == 0 and size:
        room.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    room = room.to(device)
    max_over_job(mesh, room, what="spread")  # of one that has them and others that have zeros
    return room.cpu().numpy().tobytes()


def meet(mesh: Mesh, device: torch.device) -> None:
    """Return at nearly the same time on every rank, for measurements. Work on the device is done before."""
    ready = torch.zeros(1, device=device)
    sum_over_job(mesh, ready, what="meet")
    ready.cpu()
