"""GEMMs of experts: rows of x, grouped by expert, times the matrix of their expert.

    forward  y[rows of e] = x[rows of e] W_e^T        x [r, k], W [experts, n, k], y [r, n]
    wgrad    dW_e = dy[rows of e]^T x[rows of e]      an expert without rows has a gradient of zero

torch's grouped GEMM serves forward and dgrad in bf16 where the GPU has its kernel; else a loop over the experts does.
wgrad is a loop: its GEMMs add to fp32 without rounding, and without a second gradient of all experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megascale.device import compute_capability
from megascale.ops.wgrad import Wgrad

GROUPED_CAPABILITIES = (9, 0), (10, 0)  # compute capabilities of GPUs with torch's kernel


class RowGroups(NamedTuple):
    """The rows of each expert, which follow each other: `counts` on the host, and `ends` [experts], i32 on the device,
    the row after an expert's last.
    """

    counts: tuple[int, ...]
    ends: Tensor


def grouped_gemm(x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    """Multiply the rows of x [r, k] by the matrix [n, k] of their expert, of `weight` [experts, n, k]: [r, n]."""
    if _is_grouped(x, weight):
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=groups.ends)
    out = x.new_empty(x.shape[0], weight.shape[1])
    for rows, matrix in zip(_slices(groups), weight, strict=True):
        if rows.start < rows.stop:
            torch.mm(x[rows], matrix.t(), out=out[rows])
    return out


def grouped_wgrad(total: Tensor, grad: Tensor, x: Tensor, groups: RowGroups, wgrad: Wgrad, add: bool) -> None:
    """Write the gradient of the weight into `total` [experts, n, k], or add it with `add`, for the output's gradient
    `grad` [r, n] and x [r, k].
    """
    for rows, matrix in zip(_slices(groups), total, strict=True):
        if rows.start < rows.stop:
            wgrad(matrix, grad[rows], x[rows], add)
        elif not add:
            matrix.zero_()


def _is_grouped(x: Tensor, weight: Tensor) -> bool:
    """Return True for what torch's kernel takes: rows of bf16, multiples of 16 bytes, on a GPU of compute capability
    9.0 or 10.0. Elsewhere torch itself loops, and reads the row counts again.
    """
    if x.is_cpu or x.dtype != torch.bfloat16 or not len(x) or weight.shape[1] % 8 or weight.shape[2] % 8:
        return False
    return compute_capability(x.device) in GROUPED_CAPABILITIES


def _slices(groups: RowGroups) -> list[slice]:
    slices, start = [], 0
    for count in groups.counts:
        slices.append(slice(start, start + count))
        start += count
    return slices
