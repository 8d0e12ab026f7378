"""Casts to 8 bits and their products by Transformer Engine: `tex.quantize` under one scale, and cuBLAS under one scale
or by blocks through `general_gemm`, as its own modules call them.

No scale is formed here. Its kernels for the largest magnitude pass over what is no number, and its quantizer of blocks
gives a block that is not finite the scale 1: what came of them would be finite, and nobody would know (`ops.fp8.amax`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.catalog.recipes import RECIPES
from megascale.ops import compiled
from megascale.ops.fp8 import (
    CastTranspose,
    CompiledLinear,
    Grain,
    Kernels,
    Product,
    Quantized,
    Values,
    cast_transpose,
    product,
)
from megascale.ops.library import TE
from megascale.ops.select import Setting

ENGINE = replace(TE, versions=">=2.12,<2.21")
"""Before 2.10 a product was given its workspace, before 2.12 a tensor of blocks said how its scales lie."""

ROWS = 8
"""What the rows of a first factor are a multiple of: of blocks cuBLAS demands it, of others the library's modules."""


class EngineLinear:
    """Under one scale casts and products; by blocks products. Other passes by torch.compile, or without it by torch."""

    def refusal(self, setting: Setting) -> str | None:
        return "needs a GPU" if setting.device.is_cpu else ENGINE.absence() or _unable(setting)

    def build(self, setting: Setting) -> Kernels:
        possible = compiled.refusal(setting.device) is None
        others = CompiledLinear().build(setting) if possible else Kernels()
        values = values_of(others.values, setting.device.torch)
        both = cast_transpose_of(others.cast_transpose, setting.device.torch)
        return Kernels(others.amax, values, product_of(), both)


def _unable(setting: Setting) -> str | None:
    """What the GPU cannot do, None if it can."""
    from transformer_engine.pytorch import is_fp8_available, is_fp8_block_scaling_available

    assert setting.recipe is not None
    grain = Grain(RECIPES[setting.recipe].facts["grain"])
    if grain is Grain.BLOCK and setting.device.capability[0] > 9:
        return "multiplies blocks under powers of two only on this GPU"  # as MXFP8, whose scales are these
    able, reason = (is_fp8_block_scaling_available if grain is Grain.BLOCK else is_fp8_available)(return_reason=True)
    return None if able else reason


def values_of(others: Values, device: torch.device) -> Values:
    """`fp8.values` in one kernel where one factor is for all, by `others` elsewhere."""
    quantize = _quantize_on(device)

    def values(x: Tensor, factor: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
        if factor.numel() > 1:
            return others(x, factor, largest, dtype)
        return quantize(x, factor, dtype, False)._data.view(dtype)

    return values


def cast_transpose_of(others: CastTranspose | None, device: torch.device) -> CastTranspose:
    """`fp8.CastTranspose` in one kernel where one factor is for all, by `others` elsewhere, or if there are none by
    torch.
    """
    quantize, others = _quantize_on(device), others or cast_transpose

    def both(x: Tensor, factor: Tensor, largest: float, dtype: torch.dtype, rows: bool) -> tuple[Tensor | None, Tensor]:
        if factor.numel() > 1 or not rows:
            return others(x, factor, largest, dtype, rows)
        made = quantize(x, factor, dtype, True)
        data = made._data
        # from Blackwell on its products take factors as they lie, and its casts write no transpose
        across = data.t().contiguous() if made._transpose is None else made._transpose
        return data.view(dtype), across.view(dtype)

    return both


def _quantize_on(device: torch.device) -> Callable[[Tensor, Tensor, torch.dtype, bool], Any]:
    """A cast of x under one factor, and of its transpose if that is wanted, as the library's record."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    unread = torch.zeros(1, device=device)  # the kernel writes a largest magnitude, of all that is cast

    def quantize(x: Tensor, factor: Tensor, dtype: torch.dtype, transposed: bool) -> Any:
        quantizer = Float8Quantizer(factor.view(1), unread, TE_DType[dtype], rowwise=True, columnwise=transposed)
        quantizer.internal = True  # what it makes is a record, not a tensor to torch
        return tex.quantize(x, quantizer)

    return quantize


def product_of() -> Product:
    """`fp8.product` by cuBLAS, which is given the second factor first: it counts along columns."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    def multiply(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        k = a.shape[-1]
        if Grain.ROW in (a.grain, b.grain) or a.data.numel() // k % ROWS:
            return product(a, b, dtype)
        out, *_ = general_gemm(
            _record(b),
            _record(a),
            out_dtype=dtype,
            layout="TN",  # k is the last dimension of both
            use_split_accumulator=not b.fast or b.grain is not Grain.TENSOR,  # sums in fp32
        )
        return out.view(*a.shape[:-1], b.shape[0])

    return multiply


def _record(x: Quantized) -> Any:
    """A factor as the library has it: bytes [rows, k], and what they are to be multiplied by."""
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.tensor.storage import Float8BlockwiseQTensorStorage, Float8TensorStorage

    data = x.data.reshape(-1, x.shape[-1]).contiguous().view(torch.uint8)
    number = TE_DType[x.data.dtype]
    if x.grain is Grain.TENSOR:
        return Float8TensorStorage(data=data, fp8_scale_inv=x.scale.view(1), fp8_dtype=number)
    return Float8BlockwiseQTensorStorage(
        rowwise_data=data,
        rowwise_scale_inv=_laid_out(x),
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=number,
        quantizer=None,
        is_2D_scaled=x.grain is Grain.SQUARE,
    )


def _laid_out(x: Quantized) -> Tensor:
    """The scales of blocks as cuBLAS reads them: of rows [k / BLOCK, m], of squares [m / BLOCK, k / BLOCK] with zeros
    up to a multiple of 4 in each line.
    """
    if x.grain is Grain.SQUARE:
        return F.pad(x.scale, (0, -x.scale.shape[1] % 4))
    return x.scale.reshape(-1, x.scale.shape[-1]).t().contiguous()
