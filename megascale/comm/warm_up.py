"""Communicators are made and connected before the first step, not in the middle of it.

torch makes NCCL's communicators at the first operation of a group, and NCCL connects rings, trees, multicast and pairs
of ranks at the first operation that takes them; both need the device, whose queue in a step may hold receives that wait
for other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megascale.comm.collectives import all_gather, all_gather_pieces, all_reduce, reduce_scatter
from megascale.comm.group import Group
from megascale.comm.mesh import Mesh
from megascale.device import Device

SIZES = (4, 64 << 20)
"""Bytes: NCCL takes other algorithms for a few numbers than for a model's gradients."""


def warm_up(mesh: Mesh, device: Device, *, around: bool, sizes: Sequence[int] | None = None) -> None:
    """Let each group carry out each of its operations once. All ranks come to their groups in the same order of kinds,
    and finish one before they begin the next, so that none waits for another in a circle. Every rank must call it.

    `around`: as in `open_mesh`. `sizes`: bytes of the collectives. On CPUs there are none by default, for gloo connects
    a group when it opens.
    """
    if sizes is None:
        sizes = () if device.is_cpu else SIZES
    for group in (mesh.tp, mesh.dp, mesh.tied):
        _collectives(group, sizes, device)
    _collectives(mesh.sums[-1], sizes[:1], device)  # the only group of sums of its own, which are of a few numbers
    if sizes and mesh.tp.exchange is not None:
        _pieces(mesh.tp, device)
    mesh.channels.connect(device.torch, around=around)
    device.release_memory()


def _collectives(group: Group, sizes: Sequence[int], device: Device) -> None:
    for nbytes in sizes:
        numbers = max(1, nbytes // 4 // group.size)  # of each rank, fp32: for whole numbers NCCL has fewer algorithms
        whole = torch.zeros(group.size * numbers, device=device.torch)
        part = whole.view(group.size, -1)[group.index]
        all_reduce(group, whole, what="warm up")
        all_gather(group, whole, part, what="warm up")
        reduce_scatter(group, part, whole, what="warm up")
    device.synchronize()


def _pieces(group: Group, device: Device) -> None:
    """Of the groups only tp's sends each rank's part to each other rank, which are connections of their own."""
    part = torch.zeros(1, device=device.torch)
    for _, arrived in all_gather_pieces(group, part.new_empty(group.size), part, 1, what="warm up"):
        arrived.wait()
    device.synchronize()
