"""Collectives fused with GEMMs by torch's symmetric memory (`torch.ops.symm_mem`).

On NVIDIA GPUs that map each other's memory, copy engines move pieces while tensor cores compute.

- `all_gather_matmul`, `matmul_reduce_scatter`: GEMMs in the operands' dtype
- `all_gather_scaled_matmul`, `scaled_matmul_reduce_scatter`: FP8 GEMMs
- `can_map_peers`, `has_scaled_matmul`: support by a group, and by this torch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from megascale.comm.group import Group
from megascale.comm.shared_memory import host_key
from megascale.device import Device
from megascale.record.label import Label, LabelLike

T = TypeVar("T")


def can_map_peers(group: Group, device: Device) -> bool:
    """Return True if all ranks of a group can map each other's memory. A collective of the group.

    False for groups over several hosts: without a fabric between the hosts torch's rendezvous never returns.
    """
    if group.size == 1 or device.is_cpu:
        return False
    import torch.distributed._symmetric_memory as symmetric_memory

    probe = _none_if_unsupported(partial(symmetric_memory.empty, 1024, dtype=torch.uint8, device=device.torch_device))
    ready = group.control.all_gather(host_key() if probe is not None else None, "symmetric memory")
    if None in ready or len(set(ready)) > 1:
        return False
    assert probe is not None and group.process_group is not None
    mapped = _none_if_unsupported(partial(symmetric_memory.rendezvous, probe, group.process_group))
    return all(group.control.all_gather(mapped is not None, "symmetric memory"))


def _none_if_unsupported(function: Callable[[], T]) -> T | None:
    try:
        return function()
    except (RuntimeError, NotImplementedError):  # no peer access, or no support in the driver
        return None


@cache
def has_scaled_matmul() -> bool:
    """Return True if torch has the FP8 operators with the arguments of torch 2.8: the earlier reduce-scatter takes
    2-D inputs only.
    """
    operators = torch.ops.symm_mem
    names = ("fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter")
    if not all(hasattr(operators, name) for name in names):
        return False
    arguments = operators.fused_scaled_matmul_reduce_scatter.default._schema.arguments
    return any(argument.name == "output_shape" for argument in arguments)


class ScaledMatrix(NamedTuple):
    """The second FP8 operand of a GEMM: `data` [k, n], column-major, and `scale` [] or [1, n]. `use_fast_accum` allows
    accumulation with less precision than fp32.
    """

    data: Tensor
    scale: Tensor
    use_fast_accum: bool


def all_gather_matmul(
    group: Group, part: Tensor, matrices: Sequence[Tensor], *, label: LabelLike
) -> tuple[Tensor, list[Tensor]]:
    """Return X = all-gather of `part` [s / size, b, k] along dimension 0, and X @ matrix for every matrix [k, n]."""
    with _record_fused(group, "all_gather", label, part.nbytes * group.size):
        full, outputs = torch.ops.symm_mem.fused_all_gather_matmul(part, list(matrices), 0, _name(group))
    return full, list(outputs)


def all_gather_scaled_matmul(
    group: Group,
    part: Tensor,
    scale: Tensor,
    matrices: Sequence[ScaledMatrix],
    dtype: torch.dtype,
    *,
    label: LabelLike,
) -> tuple[Tensor, list[Tensor]]:
    """Return X = all-gather of the FP8 `part` [s / size, b, k], and X @ matrix for every matrix, in `dtype`. `scale` of
    X: [] or [s, b, 1].
    """
    operands, scales, fast_accum = (list(column) for column in zip(*matrices, strict=True))
    none, dtypes = [None] * len(operands), [dtype] * len(operands)
    with _record_fused(group, "all_gather", label, part.nbytes * group.size):
        full, outputs = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
            part, operands, scale, scales, 0, _name(group), none, none, dtypes, fast_accum
        )
    return full, list(outputs)


def matmul_reduce_scatter(group: Group, x: Tensor, matrix: Tensor, *, label: LabelLike) -> Tensor:
    """Return this rank's rows [s / size, b, n] of the sum over ranks of x [s, b, k] @ matrix [k, n]."""
    with _record_fused(group, "reduce_scatter", label, x.shape[:-1].numel() * matrix.shape[1] * x.element_size()):
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", 0, _name(group))


def scaled_matmul_reduce_scatter(
    group: Group, x: Tensor, scale: Tensor, matrix: ScaledMatrix, dtype: torch.dtype, *, label: LabelLike
) -> Tensor:
    """Return this rank's rows [s / size, b, n], in `dtype`, of the sum over ranks of the FP8 x [s, b, k] @ matrix.
    `scale` of x: [] or [s, b, 1].
    """
    shape = [*x.shape[:-1], matrix.data.shape[1]]
    with _record_fused(group, "reduce_scatter", label, math.prod(shape) * dtype.itemsize):
        return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            x, matrix.data, scale, matrix.scale, "sum", 0, 0, _name(group), shape,
            out_dtype=dtype, use_fast_accum=matrix.use_fast_accum,
        )  # fmt: skip


@contextmanager
def _record_fused(group: Group, operation: str, label: LabelLike, nbytes: int) -> Iterator[None]:
    """Record a fused operation in the event log, with its end at the issue: no event can show the exposed part."""
    record = group.recorder.record_communication(
        group.axis, group.name, operation, Label.from_part(label).with_suffix("fused"), nbytes
    )
    yield
    group.recorder.log.issued(record.handle)
    group.recorder.close(record, group.recorder.mark(), known=False)


def _name(group: Group) -> str:
    assert group.process_group is not None
    return group.process_group.group_name
