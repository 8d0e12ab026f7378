"""FP8 by Transformer Engine: GEMMs by `general_gemm` (cuBLAS) with tensor or block scales, called as by Transformer
Engine's own modules.

Casts are not Transformer Engine's: its amax kernels skip NaN, and its block quantizer gives a block with infinity or
NaN the scale 1: the error would become finite and pass unnoticed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.catalog.recipes import RECIPES, ROW, TENSOR
from megascale.ops import compiled
from megascale.ops.fp8 import (
    TORCH_KERNELS,
    Fp8Kernels,
    ScaledMatmul,
    ScaledWgrad,
    TritonFp8,
    scaled_matmul,
)
from megascale.ops.library import TE
from megascale.ops.quantized import Quantized
from megascale.ops.select import OpContext

TE_GEMM = replace(TE, versions=">=2.12,<2.21")
"""Before 2.10 `general_gemm` took a workspace; before 2.12 a blockwise tensor took the layout of its scales."""

ROWS = 8
"""The row count of a GEMM's first operand is a multiple: demanded by cuBLAS for blocks, by TE's modules otherwise."""


class TEFp8:
    """TE's GEMMs with tensor or block scales; casts by Triton, or by torch."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return "needs a GPU" if context.device.is_cpu else TE_GEMM.missing_reason() or _unsupported_reason(context)

    def build(self, context: OpContext) -> Fp8Kernels:
        possible = compiled.compile_unsupported_reason(context.device) is None
        others = TritonFp8().build(context) if possible else TORCH_KERNELS
        return replace(others, scaled_matmul=te_scaled_matmul(), scaled_wgrad=te_scaled_wgrad(others.scaled_wgrad))


def _unsupported_reason(context: OpContext) -> str | None:
    """Say why this GPU cannot run the recipe; None if it can."""
    from transformer_engine.pytorch import is_fp8_available, is_fp8_block_scaling_available

    assert context.recipe is not None
    in_blocks = RECIPES[context.recipe].facts["input"].block.k is not None
    if in_blocks and context.device.capability[0] > 9:
        return "supports block scales as powers of two only on this GPU"  # it would convert to MXFP8
    supported, reason = (is_fp8_block_scaling_available if in_blocks else is_fp8_available)(return_reason=True)
    return None if supported else reason


def te_scaled_matmul() -> ScaledMatmul:
    """Return `fp8.scaled_matmul` by cuBLAS. Operands are swapped because cuBLAS is column-major."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    def multiply(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        if not _serves(a, b):
            return scaled_matmul(a, b, dtype)
        out, *_ = general_gemm(
            _te_tensor(b),
            _te_tensor(a),
            out_dtype=dtype,
            layout="TN",  # k is the last dimension of both
            use_split_accumulator=not b.use_fast_accum or b.block != TENSOR,  # fp32 accumulation
        )
        return out.view(*a.shape[:-1], b.shape[0])

    return multiply


def te_scaled_wgrad(fallback: ScaledWgrad) -> ScaledWgrad:
    """Return `fp8.scaled_wgrad` by cuBLAS, which accumulates in `total`, and `fallback` for other operands."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    def wgrad(total: Tensor, a: Quantized, b: Quantized, add: bool) -> None:
        if not _serves(a, b):
            fallback(total, a, b, add)
            return
        general_gemm(
            _te_tensor(b),
            _te_tensor(a),
            out_dtype=total.dtype,
            layout="TN",
            out=total,
            accumulate=add,
            use_split_accumulator=True,
        )

    return wgrad


def _serves(a: Quantized, b: Quantized) -> bool:
    return ROW not in (a.block, b.block) and a.shape[:-1].numel() % ROWS == 0


def _te_tensor(x: Quantized) -> Any:
    """Wrap an operand in TE's storage class: bytes [rows, k] and scales."""
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.tensor.storage import Float8BlockwiseQTensorStorage, Float8TensorStorage

    data = x.data.reshape(-1, x.shape[-1]).contiguous().view(torch.uint8)
    te_dtype = TE_DType[x.data.dtype]
    if x.block == TENSOR:
        return Float8TensorStorage(data=data, fp8_scale_inv=x.scale.view(1), fp8_dtype=te_dtype)
    return Float8BlockwiseQTensorStorage(
        rowwise_data=data,
        rowwise_scale_inv=_block_scales(x),
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=te_dtype,
        quantizer=None,
        is_2D_scaled=x.block.rows != 1,
    )


def _block_scales(x: Quantized) -> Tensor:
    """Return block scales in cuBLAS' layout: of parts of rows [k / BLOCK, m]; of squares [m / BLOCK, k / BLOCK], whose
    rows are zero-padded to a multiple of 4.
    """
    if x.block.rows != 1:
        return F.pad(x.scale, (0, -x.scale.shape[1] % 4))
    return x.scale.reshape(-1, x.scale.shape[-1]).t().contiguous()
