"""Collectives fused with matrix products by torch's symmetric memory: on NVIDIA GPUs that reach each other's memory,
copy engines move the pieces while tensor cores multiply (`torch.ops.symm_mem`).
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
from megascale.comm.shared import host_key
from megascale.core.label import Label, What
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
    ready = group.control.gather(host_key() if probe is not None else None, "symmetric memory")
    if None in ready or len(set(ready)) > 1:
        return False
    assert probe is not None and group.process_group is not None
    mapped = _attempt(partial(symmetric_memory.rendezvous, probe, group.process_group))
    return all(group.control.gather(mapped is not None, "symmetric memory"))


def _attempt(function: Callable[[], T]) -> T | None:
    try:
        return function()
    except (RuntimeError, NotImplementedError):  # no peer access, or no support in the driver
        return None


@cache
def has_scaled() -> bool:
    """Whether torch has the operators for factors in 8 bits, with the arguments that they have since 2.8: before, the
    one that scatters takes matrices only.
    """
    operators = torch.ops.symm_mem
    names = ("fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter")
    if not all(hasattr(operators, name) for name in names):
        return False
    arguments = operators.fused_scaled_matmul_reduce_scatter.default._schema.arguments
    return any(argument.name == "output_shape" for argument in arguments)


class ScaledMatrix(NamedTuple):
    """A second factor [k, n] in 8 bits, column by column in memory, its scale, [] or [1, n], and whether its sums may
    be kept in fewer bits than fp32's.
    """

    data: Tensor
    scale: Tensor
    fast: bool


def all_gather_matmul(
    group: Group, part: Tensor, matrices: Sequence[Tensor], *, what: What
) -> tuple[Tensor, list[Tensor]]:
    """The whole of part [s / size, b, k] along dimension 0, and its product with each matrix [k, n]."""
    with _recorded(group, "all_gather", what, part.nbytes * group.size):
        full, products = torch.ops.symm_mem.fused_all_gather_matmul(part, list(matrices), 0, _name(group))
    return full, list(products)


def all_gather_scaled_matmul(
    group: Group,
    part: Tensor,
    scale: Tensor,
    matrices: Sequence[ScaledMatrix],
    dtype: torch.dtype,
    *,
    what: What,
) -> tuple[Tensor, list[Tensor]]:
    """The whole of part [s / size, b, k] in 8 bits, and its product with each matrix, in `dtype`. `scale`: of the
    whole, [] or [s, b, 1].
    """
    factors, scales, fast = (list(each) for each in zip(*matrices, strict=True))
    none, dtypes = [None] * len(factors), [dtype] * len(factors)
    with _recorded(group, "all_gather", what, part.nbytes * group.size):
        full, products = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
            part, factors, scale, scales, 0, _name(group), none, none, dtypes, fast
        )
    return full, list(products)


def matmul_reduce_scatter(group: Group, x: Tensor, matrix: Tensor, *, what: What) -> Tensor:
    """This rank's rows of the sum over ranks of x [s, b, k] times matrix [k, n]: [s / size, b, n]."""
    with _recorded(group, "reduce_scatter", what, x.shape[:-1].numel() * matrix.shape[1] * x.element_size()):
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", 0, _name(group))


def scaled_matmul_reduce_scatter(
    group: Group, x: Tensor, scale: Tensor, matrix: ScaledMatrix, dtype: torch.dtype, *, what: What
) -> Tensor:
    """This rank's rows of the sum over ranks of x [s, b, k] in 8 bits times a matrix: [s / size, b, n] in `dtype`.
    `scale`: of x, [] or [s, b, 1].
    """
    shape = [*x.shape[:-1], matrix.data.shape[1]]
    with _recorded(group, "reduce_scatter", what, math.prod(shape) * dtype.itemsize):
        return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            x, matrix.data, scale, matrix.scale, "sum", 0, 0, _name(group), shape,
            out_dtype=dtype, use_fast_accum=matrix.fast,
        )  # fmt: skip


@contextmanager
def _recorded(group: Group, operation: str, what: What, nbytes: int) -> Iterator[None]:
    """Write a fused operation into the ledger. It ends there when it is issued: how much of it is hidden no event can
    say.
    """
    record = group.recorder.communication(group.axis, group.name, operation, Label.of(what).then("fused"), nbytes)
    yield
    record.end, record.closed = group.recorder.mark(), True


def _name(group: Group) -> str:
    assert group.process_group is not None
    return group.process_group.group_name
