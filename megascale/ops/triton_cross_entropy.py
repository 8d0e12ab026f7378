"""Triton kernels of the cross-entropy: the statistics by an online softmax (Milakov and Gimelshein 2018), which reads
the logits once, and the gradient, which reads and writes them once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # columns at a time: 16 bytes of bf16 per thread and read with 16 warps
WARPS = 16
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


def statistics(logits: Tensor, columns: Tensor, wide: torch.dtype, cap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `CrossEntropy.statistics` for logits in bf16 or fp32 without a cap."""
    rows, n = logits.shape
    peak, total, at_label = (torch.empty(rows, dtype=wide, device=logits.device) for _ in range(3))
    _statistics[rows,](logits, columns, peak, total, at_label, n, BLOCK, num_warps=WARPS)
    return peak, total, at_label


def gradient(logits: Tensor, columns: Tensor, peak: Tensor, scale: Tensor, minus: Tensor, cap: float | None) -> None:
    """Implement `CrossEntropy.gradient` for logits in bf16 or fp32 without a cap."""
    rows, n = logits.shape
    _gradient[rows, triton.cdiv(n, BLOCK)](logits, columns, peak, scale, minus, n, BLOCK, num_warps=WARPS)


# Triton evaluates annotations when it compiles, and knows none but its own
@triton.jit  # type: ignore[untyped-decorator]
def _statistics(  # type: ignore[no-untyped-def]
    logits, columns, peak, total, at_label, n: tl.constexpr, BLOCK: tl.constexpr
):
    """Reduce a row of logits [., n]."""
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full((), LOWEST, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * n + column, mask=column < n, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        sums = sums * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
    tl.store(peak + row, highest)
    tl.store(total + row, tl.sum(sums, 0))
    tl.store(at_label + row, tl.load(logits + row * n + tl.load(columns + row)).to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    logits, columns, peak, scale, minus, n: tl.constexpr, BLOCK: tl.constexpr
):
    """Overwrite a block of a row of logits [., n] with its gradient."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, inside = logits + row * n + column, column < n
    x = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
    softmax = tl.load(scale + row) * tl.exp(x - tl.load(peak + row))
    grad = softmax - tl.where(column == tl.load(columns + row), tl.load(minus + row), 0.0)
    tl.store(place, grad.to(logits.dtype.element_ty), mask=inside)
