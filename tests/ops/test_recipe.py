"""Recipes of the catalog, and one of another package: its quantizers and GEMM are all that a layer asks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megascale.catalog.backends import GRANULARITIES
from megascale.catalog.recipes import BLOCK_1D, BLOCK_2D, RECIPES, ROW, TENSOR, QuantizerSpec, ScaleBlock, facts_of
from megascale.core.registry import Card
from megascale.ops.fp8 import Fp8Kernels
from megascale.ops.quantized import ElementFormat, Quantized
from megascale.ops.recipe import Quantizer, Recipe, build_recipe
from tests.parallel.test_fp8_linear import configured, first_gradients
from tests.worlds import run_world

OPERANDS = ("input", "weight", "gradient")


@pytest.mark.parametrize("name", RECIPES.names())
def test_a_recipe_has_the_quantizers_of_its_card(name: str) -> None:
    recipe, facts = build_recipe(name), RECIPES[name].facts
    for operand in OPERANDS:
        assert (
            recipe.rows[operand].spec == facts[operand] and recipe.columns[operand].spec == facts[f"{operand}_column"]
        )
        assert recipe.rows[operand].element == ElementFormat[facts[operand].element.upper()]
    assert recipe.uses_history == (name == "delayed")
    assert facts["granularity"] in GRANULARITIES and facts["scaling"] == facts["input"].scaling


def test_weights_of_blocks_serve_both_directions() -> None:
    assert [block.serves_transpose for block in (TENSOR, ROW, BLOCK_1D, BLOCK_2D)] == [True, False, False, True]
    one_way = {name for name in RECIPES.names() if not RECIPES[name].facts["weight"].serves_transpose}
    assert one_way == {"rowwise", "halo", "halo_int8", "metis"}


@pytest.mark.parametrize("block", [TENSOR, ROW, BLOCK_1D, BLOCK_2D, ScaleBlock(1, 32), ScaleBlock(64, 64)], ids=str)
def test_slices_between_blocks_equal_slices_of_the_numbers(block: ScaleBlock) -> None:
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    quantizer = Quantizer(QuantizerSpec("e4m3", block))
    full = quantizer.encode(x)
    assert full.shape == x.shape and torch.linalg.norm(full.dequantize() - x) < 0.04 * torch.linalg.norm(x)
    assert torch.equal(full[128:].dequantize(), full.dequantize()[128:])
    assert torch.equal(full.columns(slice(128, 256)).dequantize(), full.dequantize()[:, 128:256])
    if block.rows == 64:
        with pytest.raises(AssertionError, match="does not cut a block"):
            full[32:]
    if block.serves_transpose:
        only = Quantized(full.data, full.scale, block, transposed=full.t().data).without_rows()
        assert only.shape == x.shape and torch.equal(only.dequantize(), full.dequantize())


def emulated(facts: Mapping[str, Any], kernels: Fp8Kernels) -> Recipe:
    """A recipe with blocks of 32, and a GEMM of numbers instead of codes."""

    def gemm(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        return (a.dequantize() @ b.dequantize().t()).to(dtype)

    def wgrad(total: Tensor, a: Quantized, b: Quantized, add: bool) -> None:
        total.copy_(total + gemm(a, b, total.dtype) if add else gemm(a, b, total.dtype))

    return Recipe.of(facts, kernels, Quantizer, gemm=gemm, wgrad=wgrad)


def test_a_recipe_of_another_package_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = QuantizerSpec("e4m3", ScaleBlock(1, 32))
    facts = facts_of(spec, spec, spec, alignment=32)
    card = Card("emulated", "blocks of 32", "tests.ops.test_recipe:emulated", facts)
    monkeypatch.setitem(RECIPES.cards, "emulated", card)
    config = configured(tmp_path, "emulated")
    (bf16,) = run_world(1, first_gradients, configured(tmp_path, "tensorwise", train__precision="bf16"))
    (ours,) = run_world(1, gradients_with, config, card)
    weight = "layers.1.attention.qkv.weight"
    assert all(np.linalg.norm(ours[name] - bf16[name]) < 0.15 * np.linalg.norm(bf16[name]) for name in bf16)
    assert np.linalg.norm(ours[weight] - bf16[weight]) > 0.01 * np.linalg.norm(bf16[weight])


def gradients_with(rank: Any, config: Any, card: Card) -> dict[str, np.ndarray]:
    RECIPES.cards[card.name] = card
    return first_gradients(rank, config)
