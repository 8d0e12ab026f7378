"""GEMMs of experts: rows of x, grouped by expert, times the matrix of their expert.

    forward  y[rows of e] = x[rows of e] W_e^T        x [r, k], W [experts, n, k], y [r, n]
    wgrad    dW_e = dy[rows of e]^T x[rows of e]      an expert without rows has a gradient of zero

On CPUs, and in fp64, a loop over the experts; on GPUs torch's grouped GEMM, which needs no row counts on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.ops.wgrad import Wgrad


class RowGroups(NamedTuple):
    """The rows of each expert, which follow each other: `counts` on the host, and `ends` [experts], i32 on the device,
    the row after an expert's last.
    """

    counts: tuple[int, ...]
    ends: Tensor


def grouped_gemm(x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    """Multiply the rows of x [r, k] by the matrix [n, k] of their expert, of `weight` [experts, n, k]: [r, n]."""
    if not x.is_cpu and x.dtype != torch.float64:
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=groups.ends)
    out = x.new_empty(x.shape[0], weight.shape[1])
    for rows, matrix in zip(_slices(groups), weight, strict=True):
        if rows.start < rows.stop:
            torch.mm(x[rows], matrix.t(), out=out[rows])
    return out


def grouped_wgrad(total: Tensor, grad: Tensor, x: Tensor, groups: RowGroups, wgrad: Wgrad, add: bool) -> None:
    """Write the gradient of the weight into `total` [experts, n, k], or add it with `add`, for the output's gradient
    `grad` [r, n] and x [r, k].
    """
    if not x.is_cpu and x.dtype != torch.float64:
        part = F.grouped_mm(grad.t(), x, offs=groups.ends)
        if add:
            total += part
        else:
            total.copy_(part)
        return
    for rows, matrix in zip(_slices(groups), total, strict=True):
        if rows.start < rows.stop:
            wgrad(matrix, grad[rows], x[rows], add)
        elif not add:
            matrix.zero_()


def _slices(groups: RowGroups) -> list[slice]:
    slices, start = [], 0
    for count in groups.counts:
        slices.append(slice(start, start + count))
        start += count
    return slices
