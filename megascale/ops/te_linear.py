"""FP8 by Transformer Engine: casts by `tex.quantize` with tensor scales, and GEMMs by `general_gemm`
(cuBLAS) with tensor or block scales, called as by Transformer Engine's own modules.

Scales come from `ops.fp8.amax`. Transformer Engine's amax kernels skip NaN, and its block quantizer gives a block with
infinity or NaN the scale 1: the error would become finite and pass unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.catalog.recipes import RECIPES, ROW, TENSOR
from megascale.ops import compiled
from megascale.ops.fp8 import (
    TORCH_KERNELS,
    CastTranspose,
    CompiledFp8,
    Fp8Kernels,
    ScaleAndCast,
    ScaledMatmul,
    cast_transpose,
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
    """TE's casts with tensor scales and GEMMs with tensor or block scales; the rest by torch.compile, or by torch."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return "needs a GPU" if context.device.is_cpu else TE_GEMM.missing_reason() or _unsupported_reason(context)

    def build(self, context: OpContext) -> Fp8Kernels:
        possible = compiled.compile_unsupported_reason(context.device) is None
        fallback = CompiledFp8().build(context) if possible else TORCH_KERNELS
        cast = te_scale_and_cast(fallback.scale_and_cast, context.device.torch_device)
        cast_both = te_cast_transpose(fallback.cast_transpose, context.device.torch_device)
        return Fp8Kernels(fallback.amax, cast, te_scaled_matmul(), cast_both)


def _unsupported_reason(context: OpContext) -> str | None:
    """Say why this GPU cannot run the recipe; None if it can."""
    from transformer_engine.pytorch import is_fp8_available, is_fp8_block_scaling_available

    assert context.recipe is not None
    in_blocks = RECIPES[context.recipe].facts["input"].block.k is not None
    if in_blocks and context.device.capability[0] > 9:
        return "supports block scales as powers of two only on this GPU"  # it would convert to MXFP8
    supported, reason = (is_fp8_block_scaling_available if in_blocks else is_fp8_available)(return_reason=True)
    return None if supported else reason


def te_scale_and_cast(fallback: ScaleAndCast, device: torch.device) -> ScaleAndCast:
    """Return `fp8.scale_and_cast` with a TE kernel for a single factor (TE's `scale`), and `fallback` for several."""
    quantize = _quantize_on(device)

    def cast(x: Tensor, factor: Tensor, fp8_max: float, dtype: torch.dtype) -> Tensor:
        if factor.numel() > 1:
            return fallback(x, factor, fp8_max, dtype)
        return quantize(x, factor, dtype, False)._data.view(dtype)

    return cast


def te_cast_transpose(fallback: CastTranspose | None, device: torch.device) -> CastTranspose:
    """Return `fp8.CastTranspose` with a TE kernel for a single factor, and `fallback`, or torch, for several."""
    quantize, fallback = _quantize_on(device), fallback or cast_transpose

    def cast_both(
        x: Tensor, factor: Tensor, fp8_max: float, dtype: torch.dtype, rowwise: bool
    ) -> tuple[Tensor | None, Tensor]:
        if factor.numel() > 1 or not rowwise:
            return fallback(x, factor, fp8_max, dtype, rowwise)
        quantized = quantize(x, factor, dtype, True)
        data = quantized._data
        # from Blackwell on TE's GEMMs take any layout, and its casts write no transpose
        transposed = data.t().contiguous() if quantized._transpose is None else quantized._transpose
        return data.view(dtype), transposed.view(dtype)

    return cast_both


def _quantize_on(device: torch.device) -> Callable[[Tensor, Tensor, torch.dtype, bool], Any]:
    """Return a function that casts x times one factor, and optionally its transpose, into a TE storage object."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    unread_amax = torch.zeros(1, dtype=torch.float32, device=device)  # the kernel writes an amax over all calls

    def quantize(x: Tensor, factor: Tensor, dtype: torch.dtype, transposed: bool) -> Any:
        quantizer = Float8Quantizer(factor.view(1), unread_amax, TE_DType[dtype], rowwise=True, columnwise=transposed)
        quantizer.internal = True  # a storage object instead of a torch.Tensor subclass
        return tex.quantize(x, quantizer)

    return quantize


def te_scaled_matmul() -> ScaledMatmul:
    """Return `fp8.scaled_matmul` by cuBLAS. Operands are swapped because cuBLAS is column-major."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    def multiply(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        k = a.shape[-1]
        if ROW in (a.block, b.block) or a.data.numel() // k % ROWS:
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
