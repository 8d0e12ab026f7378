"""A Triton kernel of SwiGLU, forward and backward, that also serves the casts of FP8 layers with a scale per tensor: of
the down layer's input, and of the up layer's output gradient.

Where a scale is known before, the kernel casts what it writes, in both layouts (`ops.planned_cast`). Otherwise it finds
the amax, and the cast needs no pass of its own for it (`ops.known_amax`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megascale.catalog.recipes import TENSOR
from megascale.ops.cast_transpose import ELEMENTS, FORMATS, cast_tile
from megascale.ops.known_amax import keep_amax
from megascale.ops.planned_cast import PlannedCast, keep_cast, planned_casts
from megascale.ops.quantized import Quantized

SIDE, WARPS = 64, 8  # of a tile


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute `ops.activation.swiglu`, and keep with result and gradient the planned cast, or the amax."""
    return _SwiGLU.apply(gate_up, *planned_casts(gate_up))


class _SwiGLU(torch.autograd.Function):
    """With only the input saved for backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, plan: PlannedCast | None, of_gradient: PlannedCast | None) -> Tensor:
        needed, gate_up = gate_up.requires_grad, gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.plan = of_gradient
        return _launch(gate_up, None, gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2), plan, needed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        return _launch(gate_up, grads[0].contiguous(), torch.empty_like(gate_up), ctx.plan, True), None, None


def _launch(
    gate_up: Tensor, grad: Tensor | None, out: Tensor, plan: PlannedCast | None, with_transpose: bool
) -> Tensor:
    """Fill `out`, and keep its cast or its amax with it."""
    m, f = out.shape[:-1].numel(), gate_up.shape[-1] // 2
    launch = _swiglu[triton.cdiv(m, SIDE), triton.cdiv(f, SIDE)]
    if plan is None:
        amax = torch.zeros((), dtype=torch.float32, device=out.device)
        given = None, None, None, None, amax.view(torch.int32), None, m, f, 0.0, None
        launch(gate_up, grad, out, *given, SIDE, num_warps=WARPS)
        keep_amax(out, rows=amax)
        return out
    element, record = plan.element, plan.record
    data, scale = torch.empty_like(out, dtype=element.dtype), torch.empty_like(plan.expected)
    columns = data.new_empty(data.shape[-1], m) if with_transpose else None
    noted = (None, None) if record is None else (record.amax.view(torch.int32), record.counts)
    given = plan.expected, scale, data, columns, *noted, m, f, element.max_value, FORMATS[element]
    launch(gate_up, grad, out, *given, SIDE, num_warps=WARPS)
    keep_cast(out, Quantized(data, scale, TENSOR, transposed=columns))
    return out


# Triton evaluates annotations when it compiles, and knows none but its own


@triton.jit
def _silu(x):  # type: ignore[no-untyped-def]
    return x / (1 + tl.exp(-x))


@triton.jit
def _round(tile, out):  # type: ignore[no-untyped-def]
    """Round to the dtype of out, where torch's operators do."""
    return tile.to(out.dtype.element_ty).to(tl.float32)


@triton.jit
def _silu_backward(grad, x):  # type: ignore[no-untyped-def]
    sigmoid = tl.sigmoid(x)
    return grad * sigmoid * (1 + x * (1 - sigmoid))


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def] # noqa: PLR0913
    tile, inside, first, end, out, amax, scale, data, transposed, record, counts, m, k, largest, FP8: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """Write a tile of a matrix [m, k] from column `first`, up to column `end`, and its cast; else raise the bits of the
    amax `record`.
    """
    row = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)[:, None]
    rounded = tl.where(inside, tile, 0.0).to(out.dtype.element_ty)
    tl.store(out + row * k + first + tl.arange(0, SIDE)[None, :], rounded, mask=inside)
    wide = rounded.to(tl.float32)
    if data is not None:
        cast_tile(
            wide, inside, first, end, amax, scale, data, transposed, record, counts, m, k, largest, FP8, False,
            0, 0, SIDE,
        )  # fmt: skip
    else:
        most = tl.max(tl.ravel(tl.abs(wide).to(tl.int32, bitcast=True)))
        tl.atomic_max(record, most, mask=most > tl.load(record), sem="relaxed")  # few tiles have a larger one


@triton.jit(do_not_specialize_on_alignment=ELEMENTS)  # type: ignore[untyped-decorator]
def _swiglu(  # type: ignore[no-untyped-def] # noqa: PLR0913
    gate_up, grad, out, amax, scale, data, transposed, record, counts, m, f, largest, FP8: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """Write a tile of silu(gate) * up for rows [2 f], gate first; with `grad` one of the gradient of each."""
    row = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)[:, None]
    column, first = tl.program_id(1) * SIDE + tl.arange(0, SIDE)[None, :], tl.program_id(1) * SIDE
    inside = (row < m) & (column < f)
    gate = tl.load(gate_up + row * 2 * f + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * f + f + column, mask=inside, other=0.0).to(tl.float32)
    if grad is None:
        result = _round(_silu(gate), out) * up
        _write(result, inside, first, f, out, amax, scale, data, transposed, record, counts, m, f, largest, FP8, SIDE)
    else:
        above, k = tl.load(grad + row * f + column, mask=inside, other=0.0).to(tl.float32), 2 * f
        of_gate, of_up = _silu_backward(_round(above * up, out), gate), above * _round(_silu(gate), out)
        _write(of_gate, inside, first, f, out, amax, scale, data, transposed, record, counts, m, k, largest, FP8, SIDE)
        _write(
            of_up, inside, f + first, k, out, amax, scale, data, transposed, record, counts, m, k, largest, FP8, SIDE
        )  # fmt: skip
