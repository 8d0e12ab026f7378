"""GEMMs of experts: rows of x, grouped by expert, times the matrix of their expert.

    forward  y[rows of e] = x[rows of e] W_e^T + w b_e        x [r, k], W [experts, n, k], b [experts, n], y [r, n]
    wgrad    dW_e = dy[rows of e]^T x[rows of e]              an expert without rows has a gradient of zero

Where there is a bias b, rows may have factors w [r, 1] of it.

torch's grouped GEMM serves forward and dgrad in bf16 where the GPU has its kernel; else a loop over the experts does.
wgrad is a loop: its GEMMs add to fp32 without rounding, and without a second gradient of all experts.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.catalog.recipes import ROW
from megascale.device import compute_capability
from megascale.ops.fp8 import ScaledMatmul
from megascale.ops.quantized import ElementFormat, Quantized
from megascale.ops.wgrad import Wgrad

GROUPED_CAPABILITIES = (9, 0), (10, 0)  # compute capabilities of GPUs with torch's kernel


class RowGroups(NamedTuple):
    """The rows of each expert, which follow each other: `counts` on the host, and `ends` [experts], i32 on the device,
    the row after an expert's last.
    """

    counts: tuple[int, ...]
    ends: Tensor

    def slices(self) -> list[slice]:
        """The rows of each expert."""
        ends = [*itertools.accumulate(self.counts)]
        return [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]


def grouped_gemm(x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    """Multiply the rows of x [r, k] by the matrix [n, k] of their expert, of `weight` [experts, n, k]: [r, n]."""
    if _is_grouped(x, weight):
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=groups.ends)
    out = x.new_empty(x.shape[0], weight.shape[1])
    for rows, matrix in zip(groups.slices(), weight, strict=True):
        if rows.start < rows.stop:
            torch.mm(x[rows], matrix.t(), out=out[rows])
    return out


def scaled_grouped_gemm(
    x: Quantized, weight: Quantized, groups: RowGroups, dtype: torch.dtype, matmul: ScaledMatmul
) -> Tensor:
    """Multiply the rows of x [r, k] by the matrix [n, k] of their expert, of `weight` [experts n, k], both quantized
    with scales of rows or parts of rows: [r, n]. torch's grouped GEMM serves E4M3 with scales of rows where the GPU has
    its kernel; no test has run it on one.
    """
    experts = len(groups.counts)
    n = weight.shape[0] // experts
    serves = x.block == weight.block == ROW and x.data.dtype == ElementFormat.E4M3.dtype
    if serves and compute_capability(x.data.device) in GROUPED_CAPABILITIES:
        stack, scales = weight.data.view(experts, n, -1).transpose(-2, -1), weight.scale.view(experts, n)
        return torch._scaled_grouped_mm(
            x.data, stack, x.scale.view(-1), scales, groups.ends, out_dtype=dtype, use_fast_accum=weight.use_fast_accum
        )
    out = x.new_empty(x.shape[0], n, dtype=dtype)
    for expert, rows in enumerate(groups.slices()):
        if rows.start < rows.stop:
            out[rows] = matmul(x[rows], weight[expert * n : (expert + 1) * n], dtype)
    return out


def add_biases_(y: Tensor, bias: Tensor, factors: Tensor | None, groups: RowGroups) -> None:
    """Add to the rows of y [r, n] the bias of their expert, of `bias` [experts, n], times the row's factor [r, 1]."""
    for rows, vector in zip(groups.slices(), bias, strict=True):
        if factors is None:
            y[rows] += vector
        else:
            y[rows].addcmul_(factors[rows].to(y.dtype), vector)


def bias_gradients(
    grad: Tensor, bias: Tensor, factors: Tensor | None, groups: RowGroups
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of `add_biases_` for the output's gradient `grad` [r, n]: of `bias`, each a sum over an
    expert's rows, and of `factors`; in fp32 or wider.
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    of_bias, found = bias.new_zeros(bias.shape, dtype=wide), []
    for rows, vector, total in zip(groups.slices(), bias.to(wide), of_bias, strict=True):
        if factors is None:
            torch.sum(grad[rows], 0, dtype=wide, out=total)
        else:
            part = grad[rows].to(wide)
            torch.mv(part.t(), factors[rows].to(grad.dtype).to(wide).squeeze(1), out=total)
            found.append(part @ vector)
            del part  # before the next is made
    return of_bias, None if factors is None else torch.cat(found).unsqueeze(1).to(factors.dtype)


def grouped_wgrad(total: Tensor, grad: Tensor, x: Tensor, groups: RowGroups, wgrad: Wgrad, add: bool) -> None:
    """Write the gradient of the weight into `total` [experts, n, k], or add it with `add`, for the output's gradient
    `grad` [r, n] and x [r, k].
    """
    for rows, matrix in zip(groups.slices(), total, strict=True):
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
