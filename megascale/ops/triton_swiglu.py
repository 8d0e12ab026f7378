"""Triton kernels of SwiGLU, forward and backward, that also find the amaxes of the rows they write.

They serve FP8 layers with a scale per tensor from its amax: the casts of the down layer's input and of the up layer's
output gradient need no pass of their own for it (`ops.known_amax`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megascale.ops.known_amax import keep_amax

SPAN, WARPS = 2048, 8  # elements of a row at a time


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute `ops.activation.swiglu`, and keep the amaxes of rows with the result and with its gradient."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    """With only the input saved for backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up, f = gate_up.contiguous(), gate_up.shape[-1] // 2
        ctx.save_for_backward(gate_up)
        out, rows = gate_up.new_empty(*gate_up.shape[:-1], f), _rows_of(gate_up)
        _swiglu[rows.numel(),](gate_up, out, rows, f, SPAN, num_warps=WARPS)
        keep_amax(out, rows=rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,), grad = ctx.saved_tensors, grads[0].contiguous()
        out, rows = torch.empty_like(gate_up), _rows_of(gate_up)
        _swiglu_backward[rows.numel(),](gate_up, grad, out, rows, grad.shape[-1], SPAN, num_warps=WARPS)
        keep_amax(out, rows=rows)
        return out


def _rows_of(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


# Triton evaluates annotations when it compiles, and knows none but its own. Magnitudes are compared by their bits, with
# infinity and NaN above all numbers, after the result is rounded.


@triton.jit
def _silu(x):  # type: ignore[no-untyped-def]
    return x / (1 + tl.exp(-x))


@triton.jit
def _silu_backward(grad, x):  # type: ignore[no-untyped-def]
    sigmoid = tl.sigmoid(x)
    return grad * sigmoid * (1 + x * (1 - sigmoid))


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(gate_up, out, rows, f, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write silu(gate) * up of a row [2 f], gate first, and its amax."""
    row, most = tl.program_id(0).to(tl.int64), tl.zeros([SPAN], tl.int32)
    for start in range(0, f, SPAN):
        column = start + tl.arange(0, SPAN)
        gate = tl.load(gate_up + row * 2 * f + column, mask=column < f, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * f + f + column, mask=column < f, other=0.0).to(tl.float32)
        result = (_silu(gate) * up).to(out.dtype.element_ty)
        tl.store(out + row * f + column, result, mask=column < f)
        most = tl.maximum(most, tl.abs(result.to(tl.float32)).to(tl.int32, bitcast=True))
    tl.store(rows + row, tl.max(most, 0).to(tl.float32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_backward(gate_up, grad, out, rows, f, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the gradients of gate and up of a row, and the amax of both."""
    row, most = tl.program_id(0).to(tl.int64), tl.zeros([SPAN], tl.int32)
    for start in range(0, f, SPAN):
        column = start + tl.arange(0, SPAN)
        gate = tl.load(gate_up + row * 2 * f + column, mask=column < f, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * f + f + column, mask=column < f, other=0.0).to(tl.float32)
        above = tl.load(grad + row * f + column, mask=column < f, other=0.0).to(tl.float32)
        of_gate = _silu_backward(above * up, gate).to(out.dtype.element_ty)
        of_up = (above * _silu(gate)).to(out.dtype.element_ty)
        tl.store(out + row * 2 * f + column, of_gate, mask=column < f)
        tl.store(out + row * 2 * f + f + column, of_up, mask=column < f)
        most = tl.maximum(most, tl.abs(of_gate.to(tl.float32)).to(tl.int32, bitcast=True))
        most = tl.maximum(most, tl.abs(of_up.to(tl.float32)).to(tl.int32, bitcast=True))
    tl.store(rows + row, tl.max(most, 0).to(tl.float32, bitcast=True))
