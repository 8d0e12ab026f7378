"""A recipe: quantizers of input, weight and output gradient of linear layers, and GEMMs of their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale.catalog.recipes import RECIPES, TENSOR, QuantizerSpec, with_scale
from megascale.ops.fp8 import TORCH_KERNELS, CastRecord, Fp8Kernels, ScaledMatmul, ScaledWgrad
from megascale.ops.quantized import ElementFormat, Quantized


class Dither(NamedTuple):
    """The place of a matrix [m, k] in the stream of random bits for stochastic rounding: the `key` of Philox, two u32;
    `rows`, i64 [m], global indices of rows; `blocks`, i64 [k / 16], global indices of blocks of 16 elements along k.
    """

    key: tuple[int, int]
    rows: Tensor
    blocks: Tensor


@dataclass(frozen=True)
class Quantizer:
    """The way from numbers to codes and scales, as `spec` describes it, with the `kernels` of a backend."""

    spec: QuantizerSpec
    kernels: Fp8Kernels = TORCH_KERNELS

    @property
    def element(self) -> ElementFormat:
        """The format of a code."""
        return ElementFormat[self.spec.element.upper()]

    def amax(self, x: Tensor) -> Tensor:
        """Return max |x| for each `spec.amax_block` of this rank's x, f32 in the shape of `Quantized.scale`. The caller
        reduces it over ranks that have parts of a block. NaN and infinity propagate.
        """
        return self.kernels.amax(x, self.spec.amax_block)

    def encode(
        self,
        x: Tensor,
        expected: Tensor | None = None,
        *,
        with_transpose: bool = False,
        record: CastRecord | None = None,
        dither: Dither | None = None,
    ) -> Quantized:
        """Quantize x [..., k], or the result of `turned`, as `fp8.Cast` says. `dither`: for stochastic rounding."""
        spec = self.spec
        pow2, both = spec.scale == "pow2", with_transpose and not spec.requantises
        quantized = self.kernels.cast(x, expected, spec.block, self.element, both, record, pow2)
        return replace(quantized, requantises=True) if spec.requantises else quantized

    def turned(self, x: Tensor) -> Tensor:
        """Transpose x [m, k] before its cast: a view if the kernels read one, else a copy."""
        return x.t() if self.kernels.strided else x.t().contiguous()

    def transpose(self, x: Quantized) -> Quantized:
        """Return `x.t()` of symmetric blocks. Codes in a single layout, such as an all-gathered input's, go through the
        kernels' cast: FP8 times a factor of 1 is unchanged.
        """
        if not self.kernels.strided or x.transposed is not None or x.columnwise or x.block != TENSOR:
            return x.t()
        largest = torch.full((), self.element.max_value, dtype=torch.float32, device=x.data.device)
        turned = x.data.reshape(-1, x.shape[-1]).t()
        return replace(self.encode(turned, largest), scale=x.scale)


@dataclass(frozen=True)
class Recipe:
    """The quantizers of X, W and dY by `rows` and, of their transposes, by `columns`, and the GEMM a b^T of two
    quantized matrices: `gemm` returns it, and `wgrad` adds it to a weight's gradient.
    """

    rows: Mapping[str, Quantizer]
    columns: Mapping[str, Quantizer]
    gemm: ScaledMatmul
    wgrad: ScaledWgrad

    @property
    def uses_history(self) -> bool:
        """True if a quantizer needs the amax of earlier steps."""
        return any(each.spec.scaling == "delayed" for each in self.rows.values())


def scaled_recipe(facts: Mapping[str, Any], kernels: Fp8Kernels) -> Recipe:
    """Make a recipe whose scales come from amaxes or are static, as the facts of its card describe the quantizers."""
    return Recipe(*quantizers(facts, kernels, Quantizer), kernels.scaled_matmul, kernels.scaled_wgrad)


def quantizers(
    facts: Mapping[str, Any], kernels: Fp8Kernels, make: Callable[[QuantizerSpec, Fp8Kernels], Quantizer]
) -> tuple[dict[str, Quantizer], dict[str, Quantizer]]:
    """Make `Recipe.rows` and `Recipe.columns` by a recipe's facts."""
    by_row, by_column = (
        {name: make(facts[name + suffix], kernels) for name in ("input", "weight", "gradient")}
        for suffix in ("", "_column")
    )
    return by_row, by_column


def build_recipe(name: str, kernels: Fp8Kernels = TORCH_KERNELS, scale: str = "fp32") -> Recipe:
    """Return a recipe of the catalog with the kernels of a backend. `scale`: the format of scales (`with_scale`)."""
    card = RECIPES[name]
    recipe: Recipe = card.load()(with_scale(card.facts, scale), kernels)
    return recipe
