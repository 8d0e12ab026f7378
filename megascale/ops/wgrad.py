"""The GEMM that forms a weight's gradient, wgrad, and adds it to the sum over micro-batches.

The sum is kept in fp32 where factors are bf16. On a GPU one cuBLAS call multiplies bf16 factors and adds to fp32: the
product is not rounded to bf16, and no pass over the weights follows it. The first micro-batch of a step writes over
what is there (beta = 0), so that nothing has to be zeroed.

On a CPU torch has no such call, and the product is rounded to bf16 before it is added. Factors cast to fp32, which
oneDNN multiplies as bf16 under `torch.backends.mkldnn.matmul.fp32_precision = "bf16"`, would avoid the rounding; on a
Xeon with AMX they made steps of 2 and 10 million parameters 13% and 8% longer, and products in fp32 15% and 25%.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megascale.ops.select import Backend, Setting
from megascale.ops.te_linear import ENGINE

Wgrad = Callable[[Tensor, Tensor, Tensor, bool], None]
"""`wgrad(total, grad, x, add)`: total [n, k] becomes grad [t, n] transposed times x [t, k], plus itself if `add`.
Without `add` it is not read. All are contiguous; total is in the format of the factors or in fp32.
"""

BLOCK_BYTES = 1 << 18
"""Of a sum, to which a part of another format is added at once on a CPU."""

ROWS = 16
"""Of the square matrices with which it is found out whether a GPU has torch's GEMM."""


class TorchWgrad(Backend):
    """torch's operators: one GEMM where total has the factors' format, else a product and a pass that adds it."""

    def build(self, setting: Setting) -> Wgrad:
        return torch_wgrad


def torch_wgrad(total: Tensor, grad: Tensor, x: Tensor, add: bool) -> None:
    """See `Wgrad`."""
    if total.dtype != grad.dtype:
        product = grad.t() @ x
        if add:
            add_(total, product)
        else:
            total.copy_(product)
    elif add:
        torch.addmm(total, grad.t(), x, out=total)
    else:
        torch.mm(grad.t(), x, out=total)


def add_(total: Tensor, part: Tensor) -> None:
    """total += part, both [n, ...]. On a CPU torch casts what has another format before it adds it: there a block of
    rows is added after the other, so that the casts stay in a core's cache.
    """
    if not total.is_cpu or part.dtype == total.dtype or total.nbytes <= BLOCK_BYTES:
        total += part
        return
    rows = max(1, BLOCK_BYTES // total[0].nbytes)
    for start in range(0, len(total), rows):
        total[start : start + rows] += part[start : start + rows]


class WideWgrad:
    """torch's GEMM of bf16 factors that ends in fp32: `addmm` and `mm` with an `out_dtype`, for NVIDIA's GPUs."""

    def refusal(self, setting: Setting) -> str | None:
        if setting.device.is_cpu:
            return "needs a GPU"
        try:
            _try(setting.device.torch)
        except Exception as error:  # by the version: no such overload, no sum in fp32, or none on this device
            return f"torch {torch.__version__} cannot add a bf16 product to fp32: {error}".splitlines()[0][:160]
        return None

    def build(self, setting: Setting) -> Wgrad:
        return wide_wgrad


def wide_wgrad(total: Tensor, grad: Tensor, x: Tensor, add: bool) -> None:
    """See `Wgrad`. `out` is `self`, so cuBLAS adds in place, and nothing is copied."""
    if add:
        torch.addmm(total, grad.t(), x, total.dtype, out=total)
    else:
        torch.mm(grad.t(), x, total.dtype, out=total)


def _try(device: torch.device) -> None:
    factor = torch.zeros(ROWS, ROWS, dtype=torch.bfloat16, device=device)
    total = torch.zeros(ROWS, ROWS, device=device)
    for add in (False, True):
        wide_wgrad(total, factor, factor, add)


class EngineWgrad:
    """Transformer Engine's `general_gemm`, as its linear layers call it."""

    def refusal(self, setting: Setting) -> str | None:
        return ENGINE.refusal(setting)

    def build(self, setting: Setting) -> Wgrad:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        def wgrad(total: Tensor, grad: Tensor, x: Tensor, add: bool) -> None:
            general_gemm(x, grad, out_dtype=total.dtype, layout="NT", out=total, accumulate=add, grad=True)

        return wgrad
