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
        both = with_transpose and not spec.requantises
        quantized = self.kernels.cast(x, expected, spec.block, self.element, both, record, spec.scale)
        return replace(quantized, requantises=True) if spec.requantises else quantized

    @property
    def orders_tokens(self) -> bool:
        """True if a scale, or a call of Philox, is for some of the tokens along k."""
        return self.spec.block.k is not None or self.spec.stochastic

    def turned(self, x: Tensor) -> Tensor:
        """Transpose x [m, k], or tokens [s, b, k] to [k, tokens], before its cast: a view if the kernels read one, else
        a copy. With `orders_tokens` they are in the order of sequences, one after the other, in any micro-batch.
        """
        x = x.transpose(0, 1) if x.dim() == 3 and self.orders_tokens else x
        turned = x.movedim(-1, 0).flatten(1)
        return turned if self.kernels.strided else turned.contiguous()

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
    """The `facts` of a card, the quantizers of X, W and dY by `rows` and, of their transposes, by `columns`, and the
    GEMM a b^T of two quantized matrices: `gemm` returns it, and `wgrad` adds it to a weight's gradient.
    """

    facts: Mapping[str, Any]
    rows: Mapping[str, Quantizer]
    columns: Mapping[str, Quantizer]
    gemm: ScaledMatmul
    wgrad: ScaledWgrad

    def __post_init__(self) -> None:
        first, second = (self.columns[name].orders_tokens for name in ("input", "gradient"))
        assert first == second, "the operands of wgrad have their tokens in the same order"

    @classmethod
    def of(
        cls, facts: Mapping[str, Any], kernels: Fp8Kernels, make: Callable[[QuantizerSpec, Fp8Kernels], Quantizer],
        gemm: ScaledMatmul, wgrad: ScaledWgrad,
    ) -> Recipe:  # fmt: skip
        """Make a recipe with the quantizers that the facts of its card describe."""
        rows, columns = (
            {name: make(facts[name + suffix], kernels) for name in ("input", "weight", "gradient")}
            for suffix in ("", "_column")
        )
        return cls(facts, rows, columns, gemm, wgrad)

    @property
    def uses_history(self) -> bool:
        """True if scales come from the amax of earlier steps."""
        return bool(self.facts["scaling"] == "delayed")


def scaled_recipe(facts: Mapping[str, Any], kernels: Fp8Kernels) -> Recipe:
    """Make a recipe whose scales come from amaxes or are static, as the facts of its card describe the quantizers."""
    return Recipe.of(facts, kernels, Quantizer, kernels.scaled_matmul, kernels.scaled_wgrad)


def build_recipe(name: str, kernels: Fp8Kernels = TORCH_KERNELS, scale: str = "fp32") -> Recipe:
    """Return a recipe of the catalog with the kernels of a backend. `scale`: the format of scales (`with_scale`)."""
    card = RECIPES[name]
    recipe: Recipe = card.load()(with_scale(card.facts, scale), kernels)
    return recipe
