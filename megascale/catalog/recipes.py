"""Quantization recipes: the quantizer of each operand of a linear layer's GEMMs.

Facts: `input`, `weight`, `gradient`: the `QuantizerSpec` of each operand. `alignment`: the sides of a GEMM must be
multiples. `granularity` and `scaling`: one word for the blocks of inputs (tensor, row or block) and for the source of
scales, the same for all operands.

A card's target is a function of its facts and of the backend's kernels, which returns an `ops.recipe.Recipe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megascale.core.registry import Card, Registry

BLOCK = 128  # elements along a side of a block with a common scale (DeepSeek-V3, 3.3)


class ScaleBlock(NamedTuple):
    """The elements of a matrix [rows, k] with a common scale: `rows` x `k` of them, None for all. k is the dimension of
    a GEMM's sum.
    """

    rows: int | None
    k: int | None

    @property
    def serves_transpose(self) -> bool:
        """True if the scales of a matrix are also those of its transpose."""
        return self.rows == self.k


TENSOR = ScaleBlock(None, None)
ROW = ScaleBlock(1, None)
BLOCK_1D = ScaleBlock(1, BLOCK)
BLOCK_2D = ScaleBlock(BLOCK, BLOCK)


@dataclass(frozen=True)
class QuantizerSpec:
    """The quantized form of an operand. `element`: the format of an element, e4m3 or e5m2. `scaling`: the source of
    scales: current, from the tensor's own amax; delayed, from the amax history of earlier steps; static, from unit
    scaling's standard deviations.
    """

    element: str
    block: ScaleBlock
    scaling: str


def _card(
    name: str, help: str, block: ScaleBlock, scaling: str, gradient: str, weight: ScaleBlock | None = None,
    alignment: int = 16,
) -> Card:  # fmt: skip
    facts = {
        "input": QuantizerSpec("e4m3", block, scaling),
        "weight": QuantizerSpec("e4m3", weight or block, scaling),
        "gradient": QuantizerSpec(gradient, block, scaling),
        "alignment": alignment,
        "granularity": {TENSOR: "tensor", ROW: "row"}.get(block, "block"),
        "scaling": scaling,
    }
    return Card(name, help, "megascale.ops.recipe:scaled_recipe", facts)


RECIPES = Registry(
    "fp8 recipe",
    "megascale.fp8_recipes",
    [
        _card("tensorwise", "a scale per tensor, from its amax", TENSOR, "current", "e5m2"),
        _card(
            "delayed", "a scale per tensor, from the amax history (Micikevicius et al. 2022)", TENSOR, "delayed", "e5m2"
        ),
        _card("rowwise", "a scale per row of an operand, from its amax", ROW, "current", "e4m3"),
        _card(
            "blockwise", "a scale per 128 elements, and per 128 x 128 of weights (DeepSeek-V3, 3.3)", BLOCK_1D,
            "current", "e4m3", BLOCK_2D, BLOCK,
        ),
        _card(
            "static", "static scales, weights at unit variance (after Narayan et al. 2025)", TENSOR, "static", "e5m2"
        ),
    ],
    synonyms={"hybrid": "tensorwise", "current": "tensorwise", "deepseek": "blockwise", "mxfp8": "", "mx": ""},
)  # fmt: skip
