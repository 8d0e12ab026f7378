"""What holds for every recipe of the catalog, in forward, dgrad and wgrad: what is not finite spreads, zeros stay."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.catalog.recipes import RECIPES
from megascale.ops.quantized import Quantized
from megascale.ops.recipe import Dither, Quantizer, Recipe, build_recipe

SIDE = 128  # the tokens and the features of a layer
GEMMS = {"forward": ("input", "weight"), "dgrad": ("gradient", "weight"), "wgrad": ("gradient", "input")}
SCALES = ("fp32", "pow2")
RECIPES_WITH_SCALES = [(name, scale) for name in RECIPES.names() for scale in SCALES]
POSITIONS = [(0, 0), (5, 77), (31, 32), (64, 15), (127, 127)]  # in the first and last rows and blocks, and within

recipes = pytest.mark.parametrize(("name", "scale"), RECIPES_WITH_SCALES)


@cache
def recipe_of(name: str, scale: str) -> Recipe:
    return build_recipe(name, scale=scale)


def operands(seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SIDE, SIDE, generator=draw).bfloat16() for name in ("input", "weight", "gradient")}


def encode(quantizer: Quantizer, x: Tensor, agreed: Tensor | None) -> Quantized:
    """Quantize x. `agreed`: a matrix on whose amaxes ranks have agreed; else those of x, or a static one."""
    amax = None if agreed is None else quantizer.amax(agreed)
    if amax is None and quantizer.spec.scaling == "static":
        amax = torch.tensor(4.0)
    return quantizer.encode(x, amax, dither=Dither((1, 2), torch.arange(len(x)), torch.arange(SIDE // 16)))


def column(recipe: Recipe, name: str, x: Tensor, agreed: Tensor | None) -> Quantized:
    """Quantize the transpose of an operand: of its codes, if they serve it."""
    rows, columns = recipe.rows[name], recipe.columns[name]
    if rows.spec.requantises:
        x = encode(rows, x, agreed).decode()
    return encode(columns, columns.turned(x), None if agreed is None else columns.turned(agreed))


def multiply(recipe: Recipe, gemm: str, given: dict[str, Tensor], agreed: dict[str, Tensor] | None = None) -> Tensor:
    """Run a GEMM of a layer. `agreed`: operands whose amaxes ranks have agreed on."""
    turned, parts = (gemm == "wgrad", gemm != "forward"), []
    for name, is_column in zip(GEMMS[gemm], turned, strict=True):
        known = None if agreed is None else agreed[name]
        made = column(recipe, name, given[name], known) if is_column else encode(recipe.rows[name], given[name], known)
        parts.append(made)
    if gemm != "wgrad":
        return recipe.gemm(*parts, torch.float32)
    total = torch.zeros(SIDE, SIDE)
    recipe.wgrad(total, *parts, True)
    return total


def reached(gemm: str, operand: str, row: int, column: int) -> Any:
    """Return the outputs that depend on an element of an operand, as an index."""
    left, _ = GEMMS[gemm]
    if operand == left:
        return (column if gemm == "wgrad" else row), slice(None)
    return slice(None), (row if gemm == "forward" else column)


@recipes
@pytest.mark.parametrize("gemm", GEMMS)
def test_one_element_that_is_not_finite_makes_all_that_depend_on_it_so(name: str, scale: str, gemm: str) -> None:
    """Also where ranks have agreed on an amax that does not know of it."""
    recipe, clean = recipe_of(name, scale), operands()
    assert multiply(recipe, gemm, clean).isfinite().all()
    cases = itertools.product(GEMMS[gemm], (math.nan, math.inf, -math.inf), enumerate(POSITIONS))
    for operand, value, (number, place) in cases:
        poisoned = {each: x.clone() for each, x in clean.items()}
        poisoned[operand][place] = value
        out = multiply(recipe, gemm, poisoned, clean if number % 2 else None)
        assert not out[reached(gemm, operand, *place)].isfinite().any(), (operand, value, place)


@recipes
@pytest.mark.parametrize("gemm", GEMMS)
def test_zeros_stay_zeros(name: str, scale: str, gemm: str) -> None:
    """Of rows, such as an expert without tokens, of blocks and of whole operands."""
    recipe, clean = recipe_of(name, scale), operands()
    for operand, rows in itertools.product(GEMMS[gemm], (slice(0, 1), slice(32, 64), slice(None))):
        given = {each: x.clone() for each, x in clean.items()}
        given[operand][rows] = 0
        out = multiply(recipe, gemm, given)
        assert out.isfinite().all()
        if gemm == "forward" or (gemm == "dgrad" and operand == "gradient"):
            zero = (rows, slice(None)) if operand == GEMMS[gemm][0] else (slice(None), rows)
            assert not out[zero].any(), "zero rows have zero codes"
        assert rows != slice(None) or not out.any()


@recipes
def test_later_tokens_reach_earlier_ones_as_the_recipe_says(name: str, scale: str) -> None:
    recipe, facts, x = recipe_of(name, scale), RECIPES[name].facts, operands()["input"]
    later = x.clone()
    later[SIDE // 2 :] *= 7
    before, after = (multiply(recipe, "forward", operands() | {"input": each})[: SIDE // 2] for each in (x, later))
    spec = recipe.rows["input"].spec
    if not facts["covers_tokens"] or spec.amax_block.rows == 1:
        assert torch.equal(before, after)
    else:
        assert not torch.equal(before, after), "a scale of all tokens"
        change = float((before - after).norm() / before.norm())
        assert change < (1e-3 if spec.scale == "pow2" else 0.06 if spec.element == "e4m3" else 0.18)
