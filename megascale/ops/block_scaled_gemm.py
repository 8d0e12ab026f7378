"""GEMMs of matrices whose scales hold for 32 (MXFP8) or 16 (NVFP4) elements along k.

Blackwell's tensor cores take the codes, and the scales in the order of `swizzled`. Elsewhere the operands are decoded:
their values times their blocks' scales are exact in bf16, so that GEMMs see the same numbers on every device, and
differ in the order of the sum alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.ops.fp8 import Fp8Kernels, ScaledMatmul, ScaledWgrad
from megascale.ops.quantized import Quantized
from megascale.ops.recipe import Quantizer, Recipe
from megascale.ops.wgrad import write

ROWS, COLUMNS = 128, 4  # scales of a tile; a matrix of scales is padded to whole tiles


def decoded_matmul(
    a: Quantized, b: Quantized, dtype: torch.dtype, decode: Callable[[Quantized], Tensor] = Quantized.decode
) -> Tensor:
    """Implement `fp8.ScaledMatmul` with numbers: of bf16 on a GPU, of fp32 on a CPU, whose GEMM would round to bf16.
    `decode`: a kernel's (`fp8.Fp8Kernels`).
    """
    rows, right = decode(a).flatten(0, -2), decode(b)
    out = rows.float() @ right.float().t() if rows.is_cpu else torch.mm(rows, right.t(), out_dtype=torch.float32)
    if a.tensor_scale is not None and b.tensor_scale is not None:
        out *= a.tensor_scale * b.tensor_scale
    return out.to(dtype).view(*a.shape[:-1], b.shape[0])


def block_scaled_matmul(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Implement `fp8.ScaledMatmul` with torch's operator for Blackwell. No test has run it on a GPU: it is called with
    what the operator's source accepts.
    """
    data = a.data.reshape(-1, a.data.shape[-1])
    (scale_a, kinds, orders), (scale_b, *_) = _scales(a), _scales(b)
    out = F.scaled_mm(data, b.data.t(), scale_a, kinds, scale_b, kinds, orders, orders, output_dtype=dtype)
    return out.view(*a.shape[:-1], b.shape[0])


def _scales(x: Quantized) -> tuple[list[Tensor], list[F.ScalingType], list[F.SwizzleType]]:
    """Return the scales of x with their kinds and orders, as torch's operator takes them."""
    kind = {32: F.ScalingType.BlockWise1x32, 16: F.ScalingType.BlockWise1x16}[x.block.k or 0]
    of_blocks = x.scale.reshape(-1, x.scale.shape[-1]).repeat_interleave(x.block.rows or 1, 0)
    scales, kinds, orders = [swizzled(of_blocks)], [kind], [F.SwizzleType.SWIZZLE_32_4_4]
    if x.tensor_scale is not None:
        scales.append(x.tensor_scale)
        kinds.append(F.ScalingType.TensorWise)
        orders.append(F.SwizzleType.NO_SWIZZLE)
    return scales, kinds, orders


def swizzled(scale: Tensor) -> Tensor:
    """Return scales [rows, k / block] in the order of tensor cores, flat: by tiles of 128 x 4, in a tile by row modulo
    32, then by the four rows of this remainder, then by column. Zeros fill the last tiles.
    """
    rows, columns = scale.shape
    high, wide = -(-rows // ROWS), -(-columns // COLUMNS)
    padded = scale.new_zeros(high * ROWS, wide * COLUMNS)
    padded[:rows, :columns] = scale
    return padded.view(high, 4, 32, wide, COLUMNS).permute(0, 3, 2, 1, 4).reshape(-1)


def accumulating(matmul: ScaledMatmul) -> ScaledWgrad:
    """Return the `fp8.ScaledWgrad` of GEMMs that cannot accumulate."""

    def wgrad(total: Tensor, a: Quantized, b: Quantized, add: bool) -> None:
        write(total, matmul(a, b, torch.float32), add)

    return wgrad


def matmul_of(kernels: Fp8Kernels) -> ScaledMatmul:
    """Return the GEMM of the compute capability for which a backend was built."""
    if kernels.capability[0] == 10:
        return block_scaled_matmul
    return partial(decoded_matmul, decode=kernels.decode)


def mxfp8_recipe(facts: Mapping[str, Any], kernels: Fp8Kernels) -> Recipe:
    """Make the recipe whose blocks of 32 elements have scales in E8M0, as its card describes the quantizers. Weights
    have blocks of a row, not squares: scales are powers of two, and the transpose quantized from codes differs in
    subnormal numbers alone.
    """
    matmul = matmul_of(kernels)
    return Recipe.of(facts, kernels, Quantizer, matmul, accumulating(matmul))
