"""Warm-up: communicators are created and connected before the first step, not during it.

torch creates a group's NCCL communicator at the group's first operation, and NCCL connects rings, trees, multicast and
pairs of ranks at their first use. Both need the device, whose queue during a step may hold receives that wait for other
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megascale.comm.collectives import all_gather, all_gather_pieces, all_reduce, reduce_scatter
from megascale.comm.group import Group
from megascale.comm.mesh import Mesh
from megascale.device import Device
from megascale.layout.stages import Link

SIZES = (4, 64 << 20)  # bytes: NCCL takes different algorithms for a few elements and for a model's gradients


def warm_up(
    mesh: Mesh, device: Device, links: Iterable[Link], sizes: Sequence[int] | None = None, *,
    owners: Sequence[Group] = (), further: Sequence[Group] = (),
) -> None:  # fmt: skip
    """Run every operation of every group once. A collective of all ranks, which warm up their groups in the same order
    of kinds and finish a kind before the next, so that they cannot deadlock.

    `links`: the pipeline ranks that exchange messages. `sizes`: bytes of the collectives; by default none on CPUs,
    because gloo connects a group when it opens. `owners`: groups whose ranks exchange matrices
    (`optim.matrix_exchange`). `further`: more groups, such as those of experts.
    """
    if sizes is None:
        sizes = () if device.is_cpu else SIZES
    for group in (mesh.tp, mesh.cp_keys, mesh.dp, *further, mesh.tied):
        _collectives(group, sizes, device)
    _collectives(mesh.reduction_groups[-1], sizes[:1], device)  # the only group not covered above; it reduces scalars
    for group in (mesh.tp, mesh.cp_heads, mesh.cp_keys, *owners, mesh.group("ep")):
        if sizes and group.p2p_transport is not None:
            part = torch.zeros(1, device=device.torch_device)  # every pair: pieces, heads, keys, values, tokens
            for _, work in all_gather_pieces(group, part.new_empty(group.size), part, 1, label="warm up"):
                work.wait()
            device.synchronize()
    mesh.p2p.connect(device.torch_device, links)
    device.release_memory()


def _collectives(group: Group, sizes: Sequence[int], device: Device) -> None:
    for nbytes in sizes:
        elements = max(1, nbytes // 4 // group.size)  # of a rank, in fp32: NCCL has fewer algorithms for integers
        full = torch.zeros(group.size * elements, device=device.torch_device)
        part = full.view(group.size, -1)[group.index]
        all_reduce(group, full, label="warm up")
        all_gather(group, full, part, label="warm up")
        reduce_scatter(group, part, full, label="warm up")
    device.synchronize()
