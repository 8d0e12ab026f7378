"""Metis: a matrix is quantized as its largest singular vectors, in FP8, and the residual, in NVFP4.

    X ~ U S V^T + R        U [m, q], V [k, q]: E4M3, a scale for each vector        S: f32        R: NVFP4

Few large singular values widen the range of all elements; the residual without them has a smaller error. It is
emulated, as in the authors' code: a GEMM multiplies the sum, in bf16, and is no faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.catalog.recipes import ROW
from megascale.ops.block_scaled_gemm import accumulating, decoded_matmul
from megascale.ops.fp8 import CastRecord, Fp8Kernels
from megascale.ops.nvfp4 import Nvfp4Quantizer
from megascale.ops.philox import block_bytes
from megascale.ops.quantized import ElementFormat, Quantized
from megascale.ops.recipe import Dither, Recipe

RANK = 16
"""Singular vectors in FP8, at most 16, the bytes of a block."""


@dataclass(frozen=True)
class SpectralQuantizer(Nvfp4Quantizer):
    """The cast of a whole operand, whose numbers it returns in bf16."""

    def encode(
        self,
        x: Tensor,
        expected: Tensor | None = None,
        *,
        with_transpose: bool = False,
        record: CastRecord | None = None,
        dither: Dither | None = None,
    ) -> Quantized:
        """Quantize x [..., k]. `expected`, the amax, has no effect: the residual has another."""
        rows = x.flatten(0, -2).float()
        left, sizes, right = largest_vectors(rows, min(RANK, *rows.shape))
        vectors = (self.kernels.cast(each.t().contiguous(), None, ROW, ElementFormat.E4M3, False, None)
                   for each in (left, right))  # fmt: skip
        u, v = (each.dequantize() for each in vectors)
        large = (u.t() * sizes) @ v
        numbers = large + super().encode((rows - large).bfloat16(), record=record).dequantize()
        ones = torch.ones(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
        return Quantized(numbers.bfloat16().view(x.shape), ones, ROW)


def largest_vectors(x: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return U [m, rank], S [rank] and V [k, rank] of x, f32 [m, k], near its largest: two steps of subspace iteration
    from the same vectors for every matrix (Halko et al. 2011). What is not finite makes all of them so.
    """
    numbers = (torch.arange(count, device=x.device) for count in (x.shape[1], 1))
    start = block_bytes((0, 0), *numbers)[:, :rank] - 127.5  # drawn on the device: a copy to it would hold up the host
    finite = torch.where(x.isfinite().all(), x, torch.zeros_like(x))
    basis = torch.linalg.qr(finite @ start).Q
    basis = torch.linalg.qr(finite @ (finite.t() @ basis)).Q
    left, sizes, right = torch.linalg.svd(basis.t() @ finite, full_matrices=False)
    return basis @ left, sizes + 0.0 * x.sum(), right.t()


def metis_recipe(facts: Mapping[str, Any], kernels: Fp8Kernels) -> Recipe:
    """Make the recipe whose operands are largest singular vectors beside a residual."""
    return Recipe.of(facts, kernels, SpectralQuantizer, decoded_matmul, accumulating(decoded_matmul))
