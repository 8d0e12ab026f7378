"""Quantization recipes: the quantizer of each operand of a linear layer's GEMMs.

Facts: `input`, `weight`, `gradient`: the `QuantizerSpec` of each operand; `input_column`, `weight_column`,
`gradient_column`: of its transpose. `alignment`: the sides of a GEMM must be multiples. `granularity` and `scaling`:
one word for the blocks of inputs (tensor, row or block), by which tables of rates and backends name them, and for the
source of scales, the same for all operands. `facts_of` derives what others ask.

A card's target is a function of its facts and of the backend's kernels, which returns an `ops.recipe.Recipe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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

    @property
    def spans_rows(self) -> bool:
        """True for several rows of many."""
        return self.rows is not None and self.rows > 1


TENSOR = ScaleBlock(None, None)
ROW = ScaleBlock(1, None)
BLOCK_1D = ScaleBlock(1, BLOCK)
BLOCK_2D = ScaleBlock(BLOCK, BLOCK)

POWERS_OF_TWO = ("pow2", "e8m0")  # formats of scales


@dataclass(frozen=True)
class QuantizerSpec:
    """The quantized form of an operand. `element`: the format of an element, e4m3, e5m2 or e2m1. `scaling`: the source
    of scales: current, from the tensor's own amax; delayed, from the amax history of earlier steps; static, from unit
    scaling's standard deviations. `scale`: the format of a scale: fp32; pow2, a power of two in fp32; e8m0, a power of
    two in a byte; nvfp4, E4M3 beside one fp32 scale of the tensor.
    """

    element: str
    block: ScaleBlock
    scaling: str = "current"
    scale: str = "fp32"

    @property
    def requantises(self) -> bool:
        """True if the transpose is quantized from the codes: rounding commutes with powers of two, but for subnormals,
        so that scales of other blocks change almost no value.
        """
        return self.scale in POWERS_OF_TWO and not self.block.serves_transpose

    @property
    def serves_transpose(self) -> bool:
        """True if one copy, saved or gathered, serves the matrix and its transpose."""
        return self.block.serves_transpose or self.requantises

    @property
    def amax_block(self) -> ScaleBlock:
        """The elements whose amax is found before the cast: of a block, or of the tensor if it has a scale, too."""
        return TENSOR if self.scale == "nvfp4" else self.block


def facts_of(
    input: QuantizerSpec, weight: QuantizerSpec, gradient: QuantizerSpec, *, alignment: int = 16, granularity: str = "",
    **columns: QuantizerSpec,
) -> dict[str, Any]:  # fmt: skip
    """Return the facts of a recipe. `columns`: specs of transposes that differ, as `gradient_column`.

    - `token_run`: consecutive tokens with a common scale in wgrad; 0 for all or one of them
    - `covers_tokens`: scales come from all tokens of a micro-batch, and other tokens change their values
    - `saves_codes`: inputs are saved for wgrad, and gathered, as codes
    - `serves_experts`: rows of experts have scales of their own
    """
    rows = {"input": input, "weight": weight, "gradient": gradient}
    of_columns = {f"{name}_column": columns.get(f"{name}_column", spec) for name, spec in rows.items()}
    over_tokens = input.block.rows is None or of_columns["input_column"].block.k is None
    return rows | of_columns | {
        "alignment": alignment,
        "granularity": granularity or {TENSOR: "tensor", ROW: "row"}.get(input.block, "block"),
        "scaling": input.scaling,
        "token_run": of_columns["input_column"].block.k or 0,
        "covers_tokens": over_tokens and input.scaling != "static",
        "saves_codes": input.serves_transpose,
        "serves_experts": input.block.rows is not None,
    }  # fmt: skip


def with_scale(facts: Mapping[str, Any], scale: str) -> Mapping[str, Any]:
    """Return the facts of a recipe with another format of its scales, if those are fp32: `pow2` rounds them up."""
    specs = {name: spec for name, spec in facts.items() if isinstance(spec, QuantizerSpec)}
    if scale == "fp32" or any(spec.scale != "fp32" for spec in specs.values()):
        return facts
    specs = {name: replace(spec, scale=scale) for name, spec in specs.items()}
    rows = [specs.pop(name) for name in ("input", "weight", "gradient")]
    return {**facts, **facts_of(*rows, alignment=facts["alignment"], granularity=facts["granularity"], **specs)}


def _card(
    name: str, help: str, block: ScaleBlock, scaling: str, gradient: str, weight: ScaleBlock | None = None,
    alignment: int = 16,
) -> Card:  # fmt: skip
    of_input, of_weight = (QuantizerSpec("e4m3", each, scaling) for each in (block, weight or block))
    facts = facts_of(of_input, of_weight, QuantizerSpec(gradient, block, scaling), alignment=alignment)
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
