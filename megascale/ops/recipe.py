"""A recipe: the quantizers of the input, the weight and the output gradient of linear layers, and the GEMM of their
results, by one backend (`ops.fp8`).

    scale = amax(|x|) / largest        data = cast(x * factor), factor = 1 / scale        x ~ data * scale

`scale` dequantizes, as in `torch._scaled_mm`. Transformer Engine names it `scale_inv`, and names `factor` `scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.catalog.recipes import RECIPES, ROW, TENSOR, QuantizerSpec, ScaleBlock
from megascale.ops.fp8 import TORCH_KERNELS, Fp8Kernels, ScaledMatmul
from megascale.ops.quantized import Fp8Format, Quantized, in_blocks, over_blocks

MIN_SCALE = 2.0**-126  # the smallest scale: fp32's smallest normal number


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

    def scale(self, amax: Tensor) -> Tensor:
        """Return the scale amax / largest, at least MIN_SCALE to keep its inverse finite, and 1 for zeros.

        A NaN or infinite amax gives a scale, and hence GEMMs, with NaN or infinity.
        """
        return torch.where(amax == 0, 1.0, (amax / self.element.max_value).clamp(min=MIN_SCALE))

    def encode(self, x: Tensor, scale: Tensor, *, with_transpose: bool = False) -> Quantized:
        """Quantize x [..., k], or the result of `turned`. Values beyond the format saturate.

        `with_transpose`: write the transpose too, if the kernels do so in the same pass.
        """
        largest, dtype, cast_both = self.element.max_value, self.element.dtype, self.kernels.cast_transpose
        factors = 1.0 / scale
        if cast_both and x.dim() == 2 and x.stride(1) != 1:
            _, data = cast_both(x.t(), _matrix(factors).t(), largest, dtype, False)
            return Quantized(data, scale, self.block)
        if cast_both and with_transpose and self.block.serves_transpose:
            rows, transposed = cast_both(x.reshape(-1, x.shape[-1]), _matrix(factors), largest, dtype, True)
            assert rows is not None
            return Quantized(rows.view(x.shape), scale, self.block, transposed=transposed)
        factors = over_blocks(factors, self.block)
        data = self.kernels.scale_and_cast(in_blocks(x, self.block), factors, largest, dtype)
        return Quantized(data.view(x.shape), scale, self.block)

    def turned(self, x: Tensor) -> Tensor:
        """Transpose x [m, k] before its cast: a view if the kernels' cast writes the transpose, else a copy."""
        return x.t() if self.kernels.cast_transpose else x.t().contiguous()

    def transpose(self, x: Quantized) -> Quantized:
        """Return `x.t()`. Codes in a single layout, such as an all-gathered input's, go through the kernels' cast: FP8
        times a factor of 1 is unchanged.
        """
        cast_both = self.kernels.cast_transpose
        if cast_both is None or x.transposed is not None or x.columnwise or x.block != TENSOR:
            return x.t()
        data = x.data.reshape(-1, x.shape[-1])
        one = torch.ones(1, 1, dtype=torch.float32, device=x.data.device)
        _, transposed = cast_both(data, one, torch.finfo(data.dtype).max, data.dtype, False)
        return Quantized(transposed, x.scale, x.block)

    def cast_stats(self, x: Tensor, quantized: Quantized) -> Tensor:
        """Count elements saturated (beyond the largest by more than rounding), underflowed to zero, and in total:
        f32 [3].
        """
        bound = over_blocks(quantized.scale, self.block) * (self.element.max_value * (1 + 2**-8))
        saturated = (in_blocks(x.abs(), self.block) > bound).sum()
        underflowed = ((x != 0) & (quantized.data.float() == 0)).sum()
        return torch.stack([saturated, underflowed, torch.full_like(underflowed, x.numel())]).float()


def _matrix(scale: Tensor) -> Tensor:
    """View scales as a matrix: [1, 1] for a tensor scale."""
    return scale.view(1, 1) if scale.dim() == 0 else scale


@dataclass(frozen=True)
class Recipe:
    """The quantizers of X, W and dY, and the GEMM a b^T of two quantized matrices."""

    input: Quantizer
    weight: Quantizer
    gradient: Quantizer
    gemm: ScaledMatmul

    def quantizer(self, operand: str) -> Quantizer:
        """Return the quantizer of `input`, `weight` or `gradient`."""
        quantizer: Quantizer = getattr(self, operand)
        return quantizer

    @property
    def uses_history(self) -> bool:
        """True if a quantizer needs the amax of earlier steps."""
        return any(each.scaling == "delayed" for each in (self.input, self.weight, self.gradient))

    def wgrad_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of wgrad's GEMM, fp32 where that runs everywhere: torch's with row scales returns fp32 on
        some GPUs only, and is rounded to bf16 before the addition to the main gradient.
        """
        return torch.bfloat16 if self.gradient.block == ROW and device.type != "cpu" else torch.float32


def scaled_recipe(facts: Mapping[str, Any], kernels: Fp8Kernels) -> Recipe:
    """Make a recipe whose scales come from amaxes or are static, as the facts of its card describe the quantizers."""

    def quantizer(operand: str) -> Quantizer:
        spec: QuantizerSpec = facts[operand]
        return Quantizer(Fp8Format[spec.element.upper()], spec.block, spec.scaling, kernels)

    return Recipe(quantizer("input"), quantizer("weight"), quantizer("gradient"), kernels.scaled_matmul)


def build_recipe(name: str, kernels: Fp8Kernels = TORCH_KERNELS) -> Recipe:
    """Return a recipe of the catalog with the kernels of a backend."""
    card = RECIPES[name]
    recipe: Recipe = card.load()(card.facts, kernels)
    return recipe
