"""Collectives fused with matrix products by torch's symmetric memory: on NVIDIA GPUs that reach each other's memory,
copy engines move the pieces while tensor cores multiply (`torch.ops.symm_mem`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from megascale.comm.collectives import gather_objects
from megascale.comm.group import Group
from megascale.comm.shared import host_key
from megascale.device import Device

T = TypeVar("T")


def usable(group: Group, device: Device) -> bool:
    """Whether all ranks of a group can map each other's memory. Every rank of the group must ask.

    torch's rendezvous waits for ever where ranks of several hosts meet without a fabric between them, so groups that
    reach over hosts go without.
    """
    if group.size == 1 or device.is_cpu:
        return False
    import torch.distributed._symmetric_memory as symmetric_memory

    probe = _attempt(partial(symmetric_memory.empty, 1024, dtype=torch.uint8, device=device.torch))
    ready = gather_objects(group, host_key() if probe is not None else None)
    if None in ready or len(set(ready)) > 1:
        return False
    assert probe is not None and group.process_group is not None
    mapped = _attempt(partial(symmetric_memory.rendezvous, probe, group.process_group))
    return all(gather_objects(group, mapped is not None))


def _attempt(function: Callable[[], T]) -> T | None:
    try:
        return function()
    except (RuntimeError, NotImplementedError):  # no peer access, or no support in the driver
        return None


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
