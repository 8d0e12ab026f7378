"""Collectives fused with matrix products by torch's symmetric memory: on NVIDIA GPUs that reach each other's memory,
copy engines move the pieces while tensor cores multiply (`torch.ops.symm_mem`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.comm.collectives import gather_objects
from megascale.comm.group import Group
from megascale.device import Device


def usable(group: Group, device: Device) -> bool:
    """Whether all ranks of a group can map each other's memory. Every rank of the group must ask."""
    if group.size == 1 or device.is_cpu:
        return False
    return all(gather_objects(group, _mapped(group, device.torch)))


def _mapped(group: Group, device: torch.device) -> bool:
    import torch.distributed._symmetric_memory as symmetric

    try:
        assert group.process_group is not None
        probe = symmetric.empty(1024, dtype=torch.uint8, device=device)
        symmetric.rendezvous(probe, group.process_group)
    except (RuntimeError, NotImplementedError):  # no NVLink, no driver support, or another host
        return False
    return True


def all_gather_matmul(
    group: Group, part: Tensor, matrices: Sequence[Tensor], *, what: str
) -> tuple[Tensor, list[Tensor]]:
    """The whole of part [s / size, b, k] along dimension 0, and its product with each matrix [k, n]."""
    nbytes = part.nbytes * group.size
    record = group.recorder.communication(group.axis, group.name, "all_gather", f"{what} fused", nbytes)
    full, products = torch.ops.symm_mem.fused_all_gather_matmul(part, list(matrices), 0, _name(group))
    record.end, record.closed = group.recorder.mark(), True  # how much of it is hidden no event can say
    return full, list(products)


def matmul_reduce_scatter(group: Group, x: Tensor, matrix: Tensor, *, what: str) -> Tensor:
    """This rank's rows of the sum over ranks of x [s, b, k] times matrix [k, n]: [s / size, b, n]."""
    nbytes = x.shape[:-1].numel() * matrix.shape[1] * x.element_size()
    record = group.recorder.communication(group.axis, group.name, "reduce_scatter", f"{what} fused", nbytes)
    out = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", 0, _name(group))
    record.end, record.closed = group.recorder.mark(), True
    return out


def _name(group: Group) -> str:
    assert group.process_group is not None
    return group.process_group.group_name
