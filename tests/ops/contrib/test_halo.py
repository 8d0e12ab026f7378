"""HALO: rotated operands cancel in each GEMM, and INT8 gains from rotation where columns have outliers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megascale.catalog.recipes import RECIPES, ROW, QuantizerSpec, facts_of
from megascale.ops.contrib.halo import RotatedQuantizer, int8_matmul
from megascale.ops.hadamard import rotate
from megascale.ops.quantized import Quantized
from megascale.ops.recipe import build_recipe


def numbers(rows: int, k: int, seed: int) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", ["halo", "halo_int8"])
@pytest.mark.parametrize(
    ("left", "right"), [("input", "weight"), ("gradient", "weight_column"), ("gradient_column", "input_column")]
)
def test_both_operands_of_a_gemm_are_rotated_or_neither(name: str, left: str, right: str) -> None:
    recipe, x, y = build_recipe(name), numbers(64, 256, 1), numbers(32, 256, 2)

    def encoded(operand: str, value: Tensor) -> Quantized:
        by = recipe.columns if operand.endswith("_column") else recipe.rows
        return by[operand.removesuffix("_column")].encode(value)

    actual = recipe.gemm(encoded(left, x), encoded(right, y), torch.float32)
    assert error(actual, x.float() @ y.float().t()) < 0.05


def test_operands_that_do_not_match_are_refused() -> None:
    plain = QuantizerSpec("e4m3", ROW)
    with pytest.raises(ValueError, match="input and weight are multiplied"):
        facts_of(replace(plain, rotated=True), plain, plain)


def test_a_rotation_is_undone_by_the_sum() -> None:
    x, y = numbers(8, 64, 3), numbers(8, 64, 4)
    assert error(rotate(x).double() @ rotate(y).double().t(), x.double() @ y.double().t()) < 0.01


def test_rotation_lowers_the_error_of_int8_and_raises_that_of_e4m3() -> None:
    """Where a column of the input is 100 times as large."""
    x, weight = numbers(256, 512, 0), numbers(128, 512, 1)
    x[:, 7] *= 100
    found = {}
    for element in ("int8", "e4m3"):
        for rotated in (False, True):
            quantizer = RotatedQuantizer(QuantizerSpec(element, ROW, rotated=rotated))
            inverse = quantizer.encode(x).dequantize(), x if not rotated else rotate(x)
            others = weight if not rotated else rotate(weight)
            found[element, rotated] = error(inverse[0] @ others.float().t(), inverse[1].float() @ others.float().t())
    assert found["int8", True] < found["int8", False] / 2
    assert found["e4m3", True] > found["e4m3", False]


def test_sums_of_int8_are_exact() -> None:
    quantizer = build_recipe("halo_int8").rows["input"]
    a, b = quantizer.encode(numbers(40, 128, 5)), quantizer.encode(numbers(24, 128, 6))
    exact = (a.data.double() * a.scale) @ (b.data.double() * b.scale).t()
    torch.testing.assert_close(int8_matmul(a, b, torch.float32).double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["halo", "halo_int8", "metis"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(name: str, value: float) -> None:
    recipe, x, weight = build_recipe(name), numbers(32, 64, 7), numbers(16, 64, 8)
    x[3, 5] = value
    out = recipe.gemm(recipe.rows["input"].encode(x), recipe.rows["weight"].encode(weight), torch.float32)
    assert not out[3].isfinite().any()


@pytest.mark.parametrize("name", ["halo", "halo_int8", "metis"])
def test_zeros_stay_zeros(name: str) -> None:
    recipe, zeros = build_recipe(name), torch.zeros(32, 64, dtype=torch.bfloat16)
    assert RECIPES[name].facts["granularity"] == "row"
    out = recipe.gemm(recipe.rows["input"].encode(zeros), recipe.rows["weight"].encode(zeros), torch.float32)
    assert torch.equal(out, torch.zeros(32, 32))
