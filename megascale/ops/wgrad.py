"""wgrad, the GEMM of a weight's gradient, fused with the accumulation over micro-batches:

    dW = dY^T X + beta dW        beta = 0 for a step's first micro-batch: main gradients need no zeroing

Main gradients are fp32 while dY and X are bf16. On a GPU a single cuBLAS call accumulates bf16 operands into fp32,
without rounding dY^T X to bf16 and without a second pass over dW (gradient accumulation fusion).

On a CPU torch has no such GEMM, and dY^T X is rounded to bf16 before the addition. Operands cast to fp32, multiplied by
oneDNN as bf16 (`torch.backends.mkldnn.matmul.fp32_precision = "bf16"`), would avoid the rounding, but on a Xeon with
AMX made steps of models with 2 and 10 million parameters 13% and 8% longer, and fp32 GEMMs 15% and 25%.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megascale.ops.row_blocks import row_blocks
from megascale.ops.select import OpBackend, OpContext

Wgrad = Callable[[Tensor, Tensor, Tensor, bool], None]
"""`wgrad(total, grad, x, add)`: total [n, k] = grad [t, n]^T x [t, k] (+ total if `add`; otherwise total is not read).
All contiguous; total has the dtype of the operands or fp32.
"""

BLOCK_BYTES = 1 << 18  # bytes of the sum per block in a mixed-dtype addition on a CPU
ROWS = 16  # side of the matrices that probe for a mixed-dtype GEMM


class TorchWgrad(OpBackend):
    """torch's operators: one GEMM if dtypes agree, else a GEMM and an addition."""

    def build(self, context: OpContext) -> Wgrad:
        return torch_wgrad


def torch_wgrad(total: Tensor, grad: Tensor, x: Tensor, add: bool) -> None:
    """Implement `Wgrad`."""
    if total.dtype != grad.dtype:
        write(total, grad.t() @ x, add)
    elif add:
        torch.addmm(total, grad.t(), x, out=total)
    else:
        torch.mm(grad.t(), x, out=total)


def write(total: Tensor, part: Tensor, add: bool) -> None:
    """Write `part` into total, or add it with `add`."""
    if add:
        add_(total, part)
    else:
        total.copy_(part)


def add_(total: Tensor, part: Tensor) -> None:
    """Compute total += part, both [n, ...]. On a CPU torch casts `part` first; in blocks the cast stays in cache."""
    if not total.is_cpu or part.dtype == total.dtype or total.nbytes <= BLOCK_BYTES:
        total += part
        return
    for rows in row_blocks(total, total[0].nbytes, BLOCK_BYTES):
        total[rows] += part[rows]


class AddmmWgrad:
    """torch's `addmm` and `mm` of bf16 operands with an fp32 `out_dtype`, for NVIDIA GPUs."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        if context.device.is_cpu:
            return "needs a GPU"
        try:
            _probe(context.device.torch_device)
        except Exception as error:  # depends on the version: no overload, no fp32 input, or unsupported device
            return f"torch {torch.__version__} cannot add a bf16 GEMM to fp32: {error}".splitlines()[0][:160]
        return None

    def build(self, context: OpContext) -> Wgrad:
        return addmm_wgrad


def addmm_wgrad(total: Tensor, grad: Tensor, x: Tensor, add: bool) -> None:
    """Implement `Wgrad`. `out` is also the input, which makes cuBLAS add in place without a copy."""
    if add:
        torch.addmm(total, grad.t(), x, total.dtype, out=total)
    else:
        torch.mm(grad.t(), x, total.dtype, out=total)


def _probe(device: torch.device) -> None:
    operand = torch.zeros(ROWS, ROWS, dtype=torch.bfloat16, device=device)
    total = torch.zeros(ROWS, ROWS, dtype=torch.float32, device=device)
    for add in (False, True):
        addmm_wgrad(total, operand, operand, add)


class TEWgrad:
    """Transformer Engine's `general_gemm`, called as by its linear layers."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        from megascale.ops.te_linear import TE_GEMM

        return TE_GEMM.unsupported_reason(context)

    def build(self, context: OpContext) -> Wgrad:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        def wgrad(total: Tensor, grad: Tensor, x: Tensor, add: bool) -> None:
            general_gemm(x, grad, out_dtype=total.dtype, layout="NT", out=total, accumulate=add, grad=True)

        return wgrad
