"""FP8 casts and GEMMs on one device, in torch's operators, and the backends that run them.

    a [m, k], b [n, k] -> a b^T [m, n]

`amax`, `scale_and_cast`, `cast_transpose`, `scaled_matmul`: the operations. `Fp8Kernels`: those that a backend may
replace. `TorchFp8`, `CompiledFp8`: backends. Quantizers (`ops.recipe`) choose what is cast, and with which scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from packaging.version import Version
from torch import Tensor

from megascale.catalog.recipes import RECIPES, TENSOR, ScaleBlock
from megascale.ops import compiled
from megascale.ops.quantized import Quantized, in_blocks
from megascale.ops.select import NotByDefault, OpContext


def amax(x: Tensor, block: ScaleBlock) -> Tensor:
    """Return max |x| for each block, in fp32 and the shape of `Quantized.scale`. NaN and infinity propagate."""
    magnitude = in_blocks(x.abs(), block)
    if block.rows is None:
        return magnitude.amax().float()
    return magnitude.amax(-1 if block.rows == 1 else (1, 3)).float()


def scale_and_cast(x: Tensor, factor: Tensor, fp8_max: float, dtype: torch.dtype) -> Tensor:
    """Cast x * factor to an FP8 `dtype`, clamped to +-`fp8_max`; `factor`, 1 / scale, broadcasts to x."""
    return (x.float() * factor).clamp(-fp8_max, fp8_max).to(dtype)


def cast_transpose(
    x: Tensor, factor: Tensor, fp8_max: float, dtype: torch.dtype, rowwise: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Implement `CastTranspose` with torch's operators: a pass for the cast and a pass for the transpose."""
    (m, k), (row_blocks, column_blocks) = x.shape, factor.shape
    blocks = x.reshape(row_blocks, m // row_blocks, column_blocks, k // column_blocks)
    data = scale_and_cast(blocks, factor[:, None, :, None], fp8_max, dtype).view(m, k)
    return data if rowwise else None, data.t().contiguous()


def scaled_matmul(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return a b^T for a [..., m, k] and b [n, k]: [..., m, n] in bf16 or fp32, accumulated in fp32."""
    rows = a.data.reshape(-1, a.shape[-1])
    if a.block.k is not None:
        out = _blockwise_mm(Quantized(rows, a.scale.reshape(rows.shape[0], -1), a.block), b, dtype)
    elif TENSOR == a.block == b.block and not rows.is_cpu:
        out = _scaled_mm(rows, b.data, a.scale, b.scale, dtype, b.use_fast_accum)
    else:  # on CPUs torch's GEMM with tensor scales is a loop, a thousand times slower than with row scales
        out = _scaled_mm(rows, b.data, _row_scales(a), _row_scales(b).t(), dtype, b.use_fast_accum)
    return out.view(*a.shape[:-1], b.shape[0])


def _scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Call `torch._scaled_mm` with scales of tensors ([], []), rows ([m, 1], [1, n]) or blocks (`_blockwise_mm`)."""
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)


def _blockwise_mm(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Multiply matrices whose scales change along k."""
    # cuBLAS requires the rows of scales to be aligned to 16 bytes.
    aligned = a.shape[0] % 4 == 0 and (b.block.rows == 1 or b.scale.shape[1] % 4 == 0)
    return (_blockwise_mm_fallback if a.data.is_cpu or not aligned else _blockwise_mm_cublas)(a, b, dtype)


def _blockwise_mm_cublas(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Multiply in one cuBLAS call, which takes scales of parts of rows outer-dim-major and of squares row-major."""
    scale_b = b.scale.t().contiguous() if b.block.rows == 1 else b.scale.t()
    return _scaled_mm(a.data, b.data, a.scale.t().contiguous().t(), scale_b, dtype)


def _blockwise_mm_fallback(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Multiply with a GEMM per block of k, and sum the results in fp32."""
    total, k, side = None, a.shape[-1], a.block.k
    assert side is not None
    for start in range(0, k, side):
        left, right = (x.columns(slice(start, start + side)) for x in (a, b))
        data = left.data.contiguous(), right.data.contiguous()
        part = _scaled_mm(*data, _row_scales(left), _row_scales(right).t(), torch.float32)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(dtype)


def _row_scales(x: Quantized) -> Tensor:
    """Return a scale for each row [rows, 1] of a matrix whose scales do not change along k."""
    scale, rows = x.scale.reshape(-1, 1), x.shape[:-1].numel()
    return scale.repeat_interleave(rows // scale.shape[0], 0)


ScaleAndCast = Callable[[Tensor, Tensor, float, torch.dtype], Tensor]
"""The signature of `scale_and_cast`."""


class CastTranspose(Protocol):
    """`scale_and_cast` of x [m, k] and of its transpose in one pass."""

    def __call__(
        self, x: Tensor, factor: Tensor, fp8_max: float, dtype: torch.dtype, rowwise: bool, /
    ) -> tuple[Tensor | None, Tensor]:
        """Return rowwise data [m, k], or None without `rowwise`, and columnwise data [k, m]. `factor` [m', k'] has an
        element for every m/m' x k/k' block of x.
        """


ScaledMatmul = Callable[[Quantized, Quantized, torch.dtype], Tensor]
"""The signature of `scaled_matmul`."""


@dataclass(frozen=True)
class Fp8Kernels:
    """The functions of an FP8 backend: amax, cast and GEMM.

    `cast_transpose`: None if no kernel writes both layouts; a transpose is then a copy.
    """

    amax: Callable[[Tensor, ScaleBlock], Tensor] = amax
    scale_and_cast: ScaleAndCast = scale_and_cast
    scaled_matmul: ScaledMatmul = scaled_matmul
    cast_transpose: CastTranspose | None = None


TORCH_KERNELS = Fp8Kernels()


class TorchFp8:
    """The backend `torch`: unfused torch operators."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return _unsupported_reason(context)

    def build(self, context: OpContext) -> Fp8Kernels:
        return TORCH_KERNELS


class CompiledFp8:
    """The backend `compile`: torch.compile for amax and cast; on a GPU a Triton kernel casts and transposes."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        slow = NotByDefault("compiling delays the first step on a CPU") if context.device.is_cpu else None
        return _unsupported_reason(context) or compiled.compile_unsupported_reason(context.device) or slow

    def build(self, context: OpContext) -> Fp8Kernels:
        both: CastTranspose | None = None
        if not context.device.is_cpu:
            from megascale.ops.cast_transpose import cast_transpose as both
        compile_ = compiled.compile_function
        return Fp8Kernels(compile_(amax), compile_(scale_and_cast), cast_transpose=both)


def _unsupported_reason(context: OpContext) -> str | None:
    """Say why torch's FP8 GEMMs cannot run on this GPU; None if they can."""
    if context.recipe is None or context.device.is_cpu:
        return None
    capability = context.device.capability
    if capability < (8, 9):
        return "FP8 GEMMs need a GPU of compute capability 8.9 or more"
    if RECIPES[context.recipe].facts["input"].block.k is not None:
        cuda = Version(torch.version.cuda or "0")
        if capability[0] != 9 or cuda < Version("12.9") or Version(torch.__version__) < Version("2.9"):
            return "FP8 GEMMs with block scales need a GPU of compute capability 9, CUDA 12.9 and torch 2.9"
    return None
