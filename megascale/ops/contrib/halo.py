"""HALO: operands of forward and dgrad are rotated by a Hadamard matrix along the sum, which spreads outliers over 16
elements (Ashkboos et al. 2025, arXiv:2501.02625).

    Y = (X H) (W H)^T        dX = (dY H) (W^T H)^T        H H^T = 1

A row of an operand has a scale. Elements are INT8, or E4M3: rotation lowers the error of INT8 where columns have
outliers, and raises that of E4M3, whose error is relative to each element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.ops.block_scaled_gemm import accumulating
from megascale.ops.fp8 import CastRecord, Fp8Kernels, note, scales_of
from megascale.ops.hadamard import rotate
from megascale.ops.quantized import ElementFormat, Quantized
from megascale.ops.recipe import Dither, Quantizer, Recipe

MIN_GPU_ROWS = 17  # of torch's INT8 GEMM
BLOCK_ROWS = 1024  # whose sums, i32 and f32, exist at a time


@dataclass(frozen=True)
class RotatedQuantizer(Quantizer):
    """The cast of an operand with a scale for each row, rotated along k if its `spec` says so."""

    def amax(self, x: Tensor) -> Tensor:
        return super().amax(self._rotated(x))

    def encode(
        self,
        x: Tensor,
        expected: Tensor | None = None,
        *,
        with_transpose: bool = False,
        record: CastRecord | None = None,
        dither: Dither | None = None,
    ) -> Quantized:
        """Quantize x [..., k]; no scale serves the transpose, and `with_transpose` has no effect."""
        rotated = self._rotated(x)
        if self.element != ElementFormat.INT8:
            return super().encode(rotated, expected, record=record)
        own = self.kernels.amax(rotated, self.spec.block)
        largest = own if expected is None else expected
        scale = scales_of(largest, self.element, self.spec.scale).where(own.isfinite(), torch.nan)  # no code says so
        codes = (rotated / scale).round_().clamp_(-self.element.max_value, self.element.max_value)
        quantized = Quantized(codes.to(self.element.dtype), scale, self.spec.block)
        if record is not None:
            note(record, rotated, quantized, self.element, largest.amax())
        return quantized

    def _rotated(self, x: Tensor) -> Tensor:
        return rotate(x) if self.spec.rotated else x


def int8_matmul(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Implement `fp8.ScaledMatmul` for INT8 codes with scales of rows, in blocks of rows; sums are exact."""
    rows, weight = a.data.reshape(-1, a.shape[-1]), b.data.t()
    out = torch.empty(len(rows), weight.shape[1], dtype=dtype, device=rows.device)
    parts = (tensor.split(BLOCK_ROWS) for tensor in (out, rows, a.scale.view(-1, 1)))
    for result, part, scale in zip(*parts, strict=True):
        fits = part.is_cpu or len(part) >= MIN_GPU_ROWS
        sums = torch._int_mm(part, weight).float() if fits else part.float() @ weight.float()
        result.copy_(sums.mul_(scale).mul_(b.scale.view(1, -1)))
    return out.view(*a.shape[:-1], weight.shape[1])


def halo_recipe(facts: Mapping[str, Any], kernels: Fp8Kernels) -> Recipe:
    """Make the recipe of a card whose operands are rotated."""
    matmul = int8_matmul if facts["input"].element == "int8" else kernels.scaled_matmul
    return Recipe.of(facts, kernels, RotatedQuantizer, matmul, accumulating(matmul))
