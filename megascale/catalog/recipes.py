"""Quantization recipes: the quantizer of each operand of a linear layer's GEMMs.

Facts: `input`, `weight`, `gradient`: the `QuantizerSpec` of each operand; `input_column`, `weight_column`,
`gradient_column`: of its transpose. `alignment`: the sides of a GEMM must be multiples. `granularity` and `scaling`:
one word for the blocks of inputs (tensor, row, block, mx or nvfp4), by which tables of rates and backends name them,
and for the source of scales, the same for all operands. `facts_of` derives what others ask.

A card's target is a function of its facts and of the backend's kernels, which returns an `ops.recipe.Recipe`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    def spans(self, dimension: int | None) -> bool:
        """True for all rows (dimension 0), or for all of a row (1): then ranks that shard it share a block."""
        return dimension is not None and self[dimension] is None

    def grid(self, rows: int, k: int) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix [rows, k]."""
        return () if self.rows is None else (rows // self.rows, k // self.k if self.k else 1)


TENSOR = ScaleBlock(None, None)
ROW = ScaleBlock(1, None)
BLOCK_1D = ScaleBlock(1, BLOCK)
BLOCK_2D = ScaleBlock(BLOCK, BLOCK)
MX = ScaleBlock(1, 32)
NVFP4_1D, NVFP4_2D = ScaleBlock(1, 16), ScaleBlock(16, 16)

POWERS_OF_TWO = ("pow2", "e8m0")  # formats of scales
DITHERED = 16  # elements along k that take their random bits together (`ops.philox`)


@dataclass(frozen=True)
class QuantizerSpec:
    """The quantized form of an operand. `element`: the format of an element, e4m3, e5m2, e2m1 or int8. `scaling`: the
    source of scales: current, from the tensor's own amax; delayed, from the amax history of earlier steps; static, from
    unit scaling's standard deviations. `scale`: the format of a scale: fp32; pow2, a power of two in fp32; e8m0, a
    power of two in a byte; nvfp4, E4M3 beside one fp32 scale of the tensor. `stochastic`: a code is one of the two
    nearest at random, by `ops.recipe.Dither`; otherwise the nearest. `rotated`: the operand is transformed along the
    GEMM's sum before (`ops.hadamard`), as must be the other. `emulated`: numbers of 16 bits stand for the codes.
    """

    element: str
    block: ScaleBlock
    scaling: str = "current"
    scale: str = "fp32"
    stochastic: bool = False
    rotated: bool = False
    emulated: bool = False

    @property
    def shifts(self) -> bool:
        """True if another scale changes values of subnormal codes alone: rounding of floating-point numbers commutes
        with powers of two.
        """
        return self.scale in POWERS_OF_TWO and self.element != "int8"

    @property
    def requantises(self) -> bool:
        """True if the transpose is quantized from the codes, whose values other scales hardly change."""
        return self.shifts and not (self.block.serves_transpose or self.rotated)

    @property
    def serves_transpose(self) -> bool:
        """True if one copy, saved or gathered, serves the matrix and its transpose."""
        return self.block.serves_transpose or self.requantises

    @property
    def amax_block(self) -> ScaleBlock:
        """The elements whose amax is found before the cast: of a block, or of the tensor if it has a scale, too."""
        return TENSOR if self.scale == "nvfp4" else self.block

    @property
    def gathers_codes(self) -> bool:
        """True if weights are gathered as codes, which serve forward and dgrad, with all their scales."""
        return self.serves_transpose and self.amax_block == self.block and not (self.stochastic or self.emulated)

    @property
    def cast_in_pieces(self) -> bool:
        """True if rows may be cast as they arrive: they are cast already, or their scales depend on no other rows."""
        return self.serves_transpose or (self.amax_block.rows is not None and not self.stochastic)

    @property
    def code_bytes(self) -> float:
        """Bytes of an element: a code, or the number that stands for it."""
        return 2.0 if self.emulated else 0.5 if self.element == "e2m1" else 1.0

    @property
    def _scale_bytes(self) -> int:
        return 1 if self.scale in ("e8m0", "nvfp4") else 4

    @property
    def cast_bytes(self) -> int:
        """Most bytes of an element during its cast by torch's operators: in fp32, and the code; of E2M1 magnitude, step
        and sums beside; of a rotation three times in fp32; of a decomposition the parts.
        """
        return 32 if self.emulated else 21 if self.element == "e2m1" else 12 if self.rotated else 5

    @property
    def decoded_bytes(self) -> int:
        """Bytes of an element that a GEMM without tensor cores for its scales decodes: in bf16, and on CPUs fp32."""
        return 6 if self._scale_bytes == 1 and not self.emulated else 0

    @property
    def element_bytes(self) -> float:
        """Bytes of an element with its part of the block's scale; scales of whole rows count nothing."""
        rows, k = self.block
        return self.code_bytes + (self._scale_bytes / (rows * k) if rows and k else 0.0)

    def count_amaxes(self, rows: int) -> int:
        """Count the amaxes of an operand of `rows` rows to which parts of a row contribute: ranks that cut them reduce
        the maxima. Blocks of a part of a row are cut nowhere.
        """
        block = self.amax_block
        return 0 if self.scaling != "current" else 1 if block.rows is None else rows if block.k is None else 0

    def row_bytes(self, k: int) -> tuple[int, int]:
        """Size the codes of a row of k elements, and its scales; none if other rows share them."""
        scales = (k // self.block.k if self.block.k else 1) if self.block.rows == 1 else 0
        return int(self.code_bytes * k), scales * self._scale_bytes


def facts_of(
    input: QuantizerSpec, weight: QuantizerSpec, gradient: QuantizerSpec, *, alignment: int = 16, granularity: str = "",
    bf16_layers: tuple[float, float] = (0.0, 0.0), whole: bool = False, **columns: QuantizerSpec,
) -> dict[str, Any]:  # fmt: skip
    """Return the facts of a recipe. `columns`: specs of transposes that differ, as `gradient_column`. `bf16_layers`:
    the shares of layers that stay in bf16 by default, of the first and of the last; one layer at least. `whole`:
    quantizers need whole matrices, which neither tp nor cp shards.

    - `token_run`: consecutive tokens with a common scale, or random bits, in wgrad; 0 for all or one of them
    - `stochastic`: an operand is rounded by random bits of its tokens
    - `covers_tokens`: scales come from all tokens of a micro-batch, and other tokens change their values
    - `free_borders`: which tokens have a common scale in wgrad changes values of subnormal codes alone, as scales of
      rows, or of parts of them, are powers of two, and rounding is to nearest
    - `saves_codes`: inputs are saved for wgrad, and gathered, as codes
    - `weight_bytes`: of an element of a weight's two operands, for forward and for dgrad
    - `serves_experts`: rows of experts have scales of their own, and no random bits of tokens
    - `saves_expert_codes`: wgrad of experts is quantized from codes of their inputs, which are saved

    Raises: ValueError if one operand of a GEMM is rotated, and the other is not
    """
    rows = {"input": input, "weight": weight, "gradient": gradient}
    of_columns = {f"{name}_column": columns.get(f"{name}_column", spec) for name, spec in rows.items()}
    both = rows | of_columns
    for left, right in (("input", "weight"), ("gradient", "weight_column"), ("gradient_column", "input_column")):
        if both[left].rotated != both[right].rotated:
            raise ValueError(f"{left} and {right} are multiplied: both are rotated, or neither")
    over_tokens = input.amax_block.rows is None or of_columns["input_column"].block.k is None
    of_tokens = [input, gradient, of_columns["input_column"], of_columns["gradient_column"]]
    stochastic = any(spec.stochastic for spec in both.values())
    free = not stochastic and all(spec.shifts and spec.block.rows == 1 for spec in of_tokens)
    return both | {
        "alignment": alignment,
        "granularity": granularity or {TENSOR: "tensor", ROW: "row"}.get(input.block, "block"),
        "scaling": input.scaling,
        "bf16_layers": bf16_layers,
        "token_run": max(max(spec.block.k or 0, DITHERED if spec.stochastic else 0) for spec in of_tokens[2:]),
        "stochastic": stochastic,
        "covers_tokens": over_tokens and input.scaling != "static",
        "free_borders": free,
        "saves_expert_codes": free and input.requantises,
        "saves_codes": input.serves_transpose,
        "weight_bytes": weight.element_bytes + of_columns["weight_column"].element_bytes,
        "serves_experts": input.amax_block.rows is not None and not stochastic,
        "whole": whole,
    }  # fmt: skip


def with_specs(facts: Mapping[str, Any], change: Callable[[QuantizerSpec], QuantizerSpec]) -> Mapping[str, Any]:
    """Return the facts of a recipe with other specs."""
    given: dict[str, Any] = {name: change(spec) for name, spec in facts.items() if isinstance(spec, QuantizerSpec)}
    given |= {name: facts[name] for name in ("alignment", "granularity", "bf16_layers", "whole")}
    return {**facts, **facts_of(**given)}


def with_scale(facts: Mapping[str, Any], scale: str) -> Mapping[str, Any]:
    """Return the facts of a recipe with another format of its scales, if those are fp32: `pow2` rounds them up."""
    if scale == "fp32" or any(isinstance(spec, QuantizerSpec) and spec.scale != "fp32" for spec in facts.values()):
        return facts
    return with_specs(facts, lambda spec: replace(spec, scale=scale))


def _card(
    name: str, help: str, block: ScaleBlock, scaling: str, gradient: str, weight: ScaleBlock | None = None,
    alignment: int = 16,
) -> Card:  # fmt: skip
    of_input, of_weight = (QuantizerSpec("e4m3", each, scaling) for each in (block, weight or block))
    facts = facts_of(of_input, of_weight, QuantizerSpec(gradient, block, scaling), alignment=alignment)
    return Card(name, help, "megascale.ops.recipe:scaled_recipe", facts)


def _nvfp4() -> Card:
    """NVIDIA's recipe: gradients alone are rounded stochastically, and both operands of wgrad are rotated. Its model of
    62 layers had the first 2 and the last 8 in bf16.
    """
    tokens = QuantizerSpec("e2m1", NVFP4_1D, scale="nvfp4")
    gradient = replace(tokens, stochastic=True)
    facts = facts_of(
        tokens, replace(tokens, block=NVFP4_2D), gradient, alignment=32, granularity="nvfp4",
        bf16_layers=(1 / 32, 1 / 8), input_column=replace(tokens, rotated=True),
        gradient_column=replace(gradient, rotated=True),
    )  # fmt: skip
    help = "4 bits: a scale per 16 elements, per 16 x 16 of weights, and per tensor (NVIDIA 2025)"
    return Card("nvfp4", help, "megascale.ops.nvfp4:nvfp4_recipe", facts)


def _halo(name: str, help: str, element: str) -> Card:
    plain = QuantizerSpec(element, ROW)
    rotated = replace(plain, rotated=True)
    facts = facts_of(rotated, rotated, rotated, weight_column=rotated, input_column=plain, gradient_column=plain)
    return Card(name, help, "megascale.ops.contrib.halo:halo_recipe", facts)


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
        Card(
            "mxfp8", "a power of two per 32 elements of a row (OCP Microscaling)",
            "megascale.ops.block_scaled_gemm:mxfp8_recipe",
            facts_of(*[QuantizerSpec("e4m3", MX, scale="e8m0")] * 3, alignment=32, granularity="mx"),
        ),
        _nvfp4(),
        _halo("halo", "rowwise, with rotated operands of forward and dgrad (HALO, Ashkboos et al. 2025)", "e4m3"),
        _halo("halo_int8", "halo with INT8 elements", "int8"),
        Card(
            "metis", "singular vectors in FP8 beside a residual in NVFP4, emulated (Metis, Cao et al. 2025)",
            "megascale.ops.contrib.metis:metis_recipe",
            facts_of(
                *[QuantizerSpec("e2m1", NVFP4_1D, scale="nvfp4", emulated=True)] * 3, granularity="row", whole=True
            ),
        ),
    ],
    synonyms={"hybrid": "tensorwise", "current": "tensorwise", "deepseek": "blockwise", "mx": "mxfp8", "fp4": "nvfp4"},
)  # fmt: skip
