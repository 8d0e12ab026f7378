"""Scales of powers of two: a transpose from the codes has almost the values of one from the original, and other tokens
hardly change a token's values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.catalog.recipes import RECIPES, facts_of, with_scale
from megascale.ops.fp8 import scales_of
from megascale.ops.known_amax import known_column_amax
from megascale.ops.quantized import ElementFormat, Quantized
from megascale.ops.recipe import build_recipe

PIECES = ("rowwise", "blockwise")  # recipes whose scales are of rows, or of parts of them


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def heavy_tail(*shape: int) -> Tensor:
    """Student's t with three degrees of freedom."""
    x, *squares = (gaussian(*shape, seed=seed).float() for seed in (2, 3, 4, 5))
    return (x / (sum(square**2 for square in squares) / 3).sqrt()).bfloat16()


def error(found: Tensor, x: Tensor) -> float:
    return float(torch.linalg.norm(found - x.float()) / torch.linalg.norm(x.float()))


def test_golden_codes() -> None:
    x = torch.tensor([[3.0, -1.0, 0.005, 2.0]])
    row = build_recipe("rowwise", scale="pow2").rows["input"].encode(x)
    assert row.scale.tolist() == [[2.0**-7]] and row.codes.tolist() == [[0x7C, 0xF0, 0x32, 0x78]]
    assert row.dequantize().tolist() == [[3.0, -1.0, 0.0048828125, 2.0]]


def test_scales_are_rounded_up_to_powers_of_two() -> None:
    amaxes = torch.cat([2.0 ** torch.arange(-140.0, 128.0), gaussian(10_000).float().abs()])
    scales, exact = (scales_of(amaxes, ElementFormat.E4M3, format) for format in ("pow2", "fp32"))
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    assert bool(((exact <= scales) & (scales < 2 * exact)).all())
    none = scales_of(torch.tensor([torch.nan, torch.inf]), ElementFormat.E4M3, "pow2")
    assert not bool(none.isfinite().any())


def columns(x: Tensor, recipe: str, scale: str) -> tuple[Tensor, Tensor]:
    """Return the values of x^T, quantized from the codes of x and from x."""
    built = build_recipe(recipe, scale=scale)
    row, column = built.rows["input"], built.columns["input"]
    from_codes = column.encode(column.turned(row.encode(x).decode()))
    return from_codes.dequantize(), column.encode(column.turned(x)).dequantize()


@pytest.mark.parametrize("recipe", PIECES)
@pytest.mark.parametrize(("draw", "most"), [(gaussian, 1e-4), (heavy_tail, 1e-2)])
def test_a_transpose_from_codes_has_the_values_of_one_from_the_original(recipe: str, draw: Any, most: float) -> None:
    x = draw(1024, 1024)
    found, direct = columns(x, recipe, "pow2")
    assert (found != direct).float().mean() <= most
    assert abs(error(found, x.t()) - error(direct, x.t())) <= 2e-4
    exact, of_exact = columns(x, recipe, "fp32")  # which therefore keep the original
    assert (exact != of_exact).float().mean() > 0.3
    assert error(exact, x.t()) > 1.2 * error(of_exact, x.t())


def test_the_transpose_is_not_cast_by_the_amaxes_of_the_original() -> None:
    x = gaussian(64, 128)
    exact, pow2 = (build_recipe("rowwise", scale=scale).rows["input"] for scale in ("fp32", "pow2"))
    pow2.encode(x, with_transpose=True)
    assert known_column_amax(x) is None, "of x, not of its codes"
    exact.encode(x, with_transpose=True)
    assert known_column_amax(x) is not None


def outputs(recipe: str, scale: str, x: Tensor, weight: Tensor) -> Tensor:
    built = build_recipe(recipe, scale=scale)
    return built.gemm(built.rows["input"].encode(x), built.rows["weight"].encode(weight), torch.float32)


LEAKS = {("rowwise", "fp32"): 0.0, ("rowwise", "pow2"): 0.0, ("blockwise", "fp32"): 0.0, ("blockwise", "pow2"): 0.0,
         ("tensorwise", "pow2"): 1e-3}  # fmt: skip
"""The most that later tokens, times 7, change of earlier outputs."""


@pytest.mark.parametrize("draw", [gaussian, heavy_tail])
def test_later_tokens_hardly_change_earlier_outputs(draw: Any) -> None:
    x, weight = draw(256, 512), gaussian(256, 512, seed=1)
    louder = torch.cat([x[:128], 7 * x[128:]])

    def leak(recipe: str, scale: str) -> float:
        before, after = (outputs(recipe, scale, each, weight)[:128] for each in (x, louder))
        return float(torch.linalg.norm(after - before) / torch.linalg.norm(before))

    assert all(leak(*case) <= most for case, most in LEAKS.items())
    assert leak("tensorwise", "fp32") > 0.02, "4% are measured"


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("recipe", PIECES)
def test_samples_have_the_same_operands_in_any_micro_batch(recipe: str, scale: str) -> None:
    """Inputs and gradients [s, b, k] of forward and dgrad; with scales of blocks those of wgrad, too, whose tokens are
    in the order of samples.
    """
    built, x, order = build_recipe(recipe, scale=scale), gaussian(256, 4, 128), torch.tensor([2, 0, 3, 1])
    for operand in ("input", "gradient"):
        row, column = built.rows[operand], built.columns[operand]
        whole, permuted = row.encode(x), row.encode(x[:, order].contiguous())
        assert all(torch.equal(a[:, order], b) for a, b in zip(parts(whole), parts(permuted), strict=True))
        together = column.encode(column.turned(x))
        for count in (1, 2):  # samples in a micro-batch
            found = [column.encode(column.turned(part)) for part in x.split(count, 1)]
            joined = [torch.cat(each, 1) for each in zip(*map(parts, found), strict=True)]
            equal = [torch.equal(a, b) for a, b in zip(joined, parts(together), strict=True)]
            assert recipe == "rowwise" or all(equal)


def parts(x: Quantized) -> tuple[Tensor, Tensor]:
    """The codes and the scales of each row."""
    return x.codes, x.scale


def test_facts_of_scales_of_powers_of_two() -> None:
    facts = {name: with_scale(RECIPES[name].facts, "pow2") for name in ("tensorwise", *PIECES)}
    exact = {name: RECIPES[name].facts for name in facts}
    assert [fact["saves_codes"] for fact in facts.values()] == [True, True, True]
    assert [fact["saves_codes"] for fact in exact.values()] == [True, False, False]
    assert [fact["free_borders"] for fact in facts.values()] == [False, True, True]
    assert not any(fact["free_borders"] for fact in exact.values())


def test_other_scales_change_no_value_of_floating_point_numbers_alone() -> None:
    """A power of two shifts their exponents, but is another step between integers."""
    free = {name: with_scale(RECIPES[name].facts, "pow2")["free_borders"] for name in ("halo", "halo_int8")}
    assert free == {"halo": True, "halo_int8": False}
    assert not replace(RECIPES["halo_int8"].facts["input_column"], scale="pow2").requantises


def test_another_scale_leaves_the_other_facts() -> None:
    facts = facts_of(*[RECIPES["rowwise"].facts["input"]] * 3, whole=True, alignment=64, bf16_layers=(0.1, 0.2))
    kept = ("whole", "alignment", "bf16_layers", "granularity")
    assert [with_scale(facts, "pow2")[name] for name in kept] == [facts[name] for name in kept]
