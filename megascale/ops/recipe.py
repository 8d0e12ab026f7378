"""A recipe: quantizers of input, weight and output gradient of linear layers, and GEMMs of their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megascale.catalog.recipes import RECIPES, TENSOR, QuantizerSpec, ScaleBlock
from megascale.ops.fp8 import TORCH_KERNELS, CastRecord, Fp8Kernels, ScaledMatmul, ScaledWgrad
from megascale.ops.quantized import Fp8Format, Quantized


@dataclass(frozen=True)
class Quantizer:
    """The way from numbers to codes and scales. `element`: the format of a code; `block`: the elements with a common
    scale; `scaling`: the source of scales (`catalog.recipes`); `kernels`: the backend's.
    """

    element: Fp8Format
    block: ScaleBlock
    scaling: str = "current"
    kernels: Fp8Kernels = TORCH_KERNELS

    def amax(self, x: Tensor) -> Tensor:
        """Return max |x| for each block of this rank's x, f32 in the shape of `Quantized.scale`. The caller reduces it
        over ranks that have parts of a block. NaN and infinity propagate.
        """
        return self.kernels.amax(x, self.block)

    def encode(
        self,
        x: Tensor,
        expected: Tensor | None = None,
        *,
        with_transpose: bool = False,
        record: CastRecord | None = None,
    ) -> Quantized:
        """Quantize x [..., k], or the result of `turned`, as `fp8.Cast` says."""
        return self.kernels.cast(x, expected, self.block, self.element, with_transpose, record)

    def turned(self, x: Tensor) -> Tensor:
        """Transpose x [m, k] before its cast: a view if the kernels read one, else a copy."""
        return x.t() if self.kernels.strided else x.t().contiguous()

    def transpose(self, x: Quantized) -> Quantized:
        """Return `x.t()`. Codes in a single layout, such as an all-gathered input's, go through the kernels' cast: FP8
        times a factor of 1 is unchanged.
        """
        if not self.kernels.strided or x.transposed is not None or x.columnwise or x.block != TENSOR:
            return x.t()
        largest = torch.full((), self.element.max_value, dtype=torch.float32, device=x.data.device)
        turned = x.data.reshape(-1, x.shape[-1]).t()
        return replace(self.encode(turned, largest), scale=x.scale)


@dataclass(frozen=True)
class Recipe:
    """The quantizers of X, W and dY, and the GEMM a b^T of two quantized matrices: `gemm` returns it, and `wgrad`
    adds it to a weight's gradient.
    """

    input: Quantizer
    weight: Quantizer
    gradient: Quantizer
    gemm: ScaledMatmul
    wgrad: ScaledWgrad

    def quantizer(self, operand: str) -> Quantizer:
        """Return the quantizer of `input`, `weight` or `gradient`."""
        quantizer: Quantizer = getattr(self, operand)
        return quantizer

    @property
    def uses_history(self) -> bool:
        """True if a quantizer needs the amax of earlier steps."""
        return any(each.scaling == "delayed" for each in (self.input, self.weight, self.gradient))


def scaled_recipe(facts: Mapping[str, Any], kernels: Fp8Kernels) -> Recipe:
    """Make a recipe whose scales come from amaxes or are static, as the facts of its card describe the quantizers."""

    def quantizer(operand: str) -> Quantizer:
        spec: QuantizerSpec = facts[operand]
        return Quantizer(Fp8Format[spec.element.upper()], spec.block, spec.scaling, kernels)

    return Recipe(
        quantizer("input"), quantizer("weight"), quantizer("gradient"), kernels.scaled_matmul, kernels.scaled_wgrad
    )


def build_recipe(name: str, kernels: Fp8Kernels = TORCH_KERNELS) -> Recipe:
    """Return a recipe of the catalog with the kernels of a backend."""
    card = RECIPES[name]
    recipe: Recipe = card.load()(card.facts, kernels)
    return recipe
