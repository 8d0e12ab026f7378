"""NVFP4: E2M1 elements, an E4M3 scale for each block of 16, and an fp32 scale of the tensor (NVIDIA 2025,
arXiv:2509.25149).

    x ~ code * S * s        s = amax / 2688        S = E4M3(amax of the block / 6 / s)        code = E2M1(x / (S * s))

2688 is the largest S times the largest code. Codes depend on the order of operations, which is Transformer Engine's.
Blocks of weights are 16 x 16: both directions have the same values. wgrad's operands are rotated along the tokens
(`ops.hadamard`), which its sum undoes. Gradients alone are rounded stochastically, without bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.ops import fp4, hadamard
from megascale.ops.block_scaled_gemm import accumulating, matmul_of
from megascale.ops.fp8 import CastRecord, Fp8Kernels, note
from megascale.ops.philox import block_bytes
from megascale.ops.quantized import ElementFormat, Quantized, in_blocks, over_blocks, pack
from megascale.ops.recipe import Dither, Quantizer, Recipe

LARGEST_SCALE = ElementFormat.E4M3.max_value
LARGEST = LARGEST_SCALE * fp4.LARGEST
FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Nvfp4Quantizer(Quantizer):
    """The cast of an operand, or of its transpose, as `spec` describes it."""

    def turned(self, x: Tensor) -> Tensor:
        """Transpose x, and rotate it if it is an operand of wgrad."""
        turned = super().turned(x)
        return hadamard.rotate(turned) if self.spec.rotated else turned

    def encode(
        self,
        x: Tensor,
        expected: Tensor | None = None,
        *,
        with_transpose: bool = False,
        record: CastRecord | None = None,
        dither: Dither | None = None,
    ) -> Quantized:
        """Quantize x [..., k], or the result of `turned`, by the tensor's amax, `expected`, f32 []; None: x's own.

        Raises: ValueError if the operand is rounded stochastically, and `dither` is missing
        """
        block, amax = self.spec.block, self.amax(x) if expected is None else expected
        to_fp4 = torch.where(amax == 0, 1.0, torch.div(LARGEST, amax).clamp(max=FP32_MAX))
        tensor_scale = 1 / to_fp4
        of_blocks = self.kernels.amax(x, block)
        scale = (of_blocks * (to_fp4 * (1 / fp4.LARGEST))).clamp(max=LARGEST_SCALE)
        scale = scale.where(of_blocks.isfinite(), torch.nan)  # no code says so
        scale = scale.to(ElementFormat.E4M3.dtype)
        factor = (1 / (scale.float() * tensor_scale)).clamp(max=FP32_MAX)
        scaled = (in_blocks(x, block).float() * over_blocks(factor, block)).view(x.shape)
        if self.spec.stochastic:
            if dither is None:
                raise ValueError("stochastic rounding needs the place of the matrix in the job: `dither`")
            codes = fp4.stochastic(scaled, block_bytes(*dither).view(x.shape))
        else:
            codes = fp4.nearest(scaled)
        quantized = Quantized(pack(codes), scale, block, tensor_scale=tensor_scale)
        if record is not None:
            note(record, x, quantized, self.element, amax)
        return quantized


def nvfp4_recipe(facts: Mapping[str, Any], kernels: Fp8Kernels) -> Recipe:
    """Make the recipe of a card whose operands are NVFP4."""
    matmul = matmul_of(kernels)
    return Recipe.of(facts, kernels, Nvfp4Quantizer, matmul, accumulating(matmul))
