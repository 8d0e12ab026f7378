"""Recipes quantize as one process in every layout: without the rounding of bf16 sums, runs are the same to 1e-10.

Compute is in fp64, and GEMMs multiply what codes and scales stand for. In bf16 ranks of tp add outputs that are
rounded; an amax that differs in its last bit changes most codes of a tensor, and losses by 1e-3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.catalog.precisions import PRECISIONS
from megascale.config.run import RunConfig
from megascale.ops.quantized import Quantized
from megascale.ops.wgrad import write
from megascale.parallel import fp8_linear
from tests.marks import only_quick, only_quick_rows
from tests.parallel.test_fp8_linear import NAMES, WIDE, configured
from tests.runs import curve_of
from tests.thread_world import run_threads

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"parallel__tp": 2},
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "tp2 sp, no overlap": {"parallel__tp": 2, "parallel__sp": True, "overlap__tp": False},
    "cp2": {"parallel__cp": 2, "model__seq_length": 512},
    "pp2 zb_h1": {"parallel__pp": 2, "parallel__schedule": "zb_h1"},
    "dp2 zero3": {"parallel__dp": 2, "parallel__zero": 3},
}
RECIPES = [*((name, "fp32") for name in NAMES), *((name, "pow2") for name in ("tensorwise", "rowwise", "blockwise"))]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute and accumulate in fp64 what [fp8] quantizes."""
    facts = PRECISIONS["fp64"].facts | {"quantizes": True}
    monkeypatch.setitem(PRECISIONS.cards, "fp8", replace(PRECISIONS["fp8"], target="torch:float64", facts=facts))


def gemm(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    out = a.dequantize().double().flatten(0, -2) @ b.dequantize().double().t()
    return out.to(dtype).view(*a.shape[:-1], b.shape[0])


def wgrad(total: Tensor, a: Quantized, b: Quantized, add: bool) -> None:
    write(total, gemm(a, b, total.dtype), add)


def curve(config: RunConfig) -> tuple[float, float]:
    """Return the loss and the gradient norm of the third step."""

    def trained(run: Any) -> list[tuple[float, float]]:
        run.fp8_state.recipe = replace(run.fp8_state.recipe, gemm=gemm, wgrad=wgrad)
        return curve_of(run, 3)

    return run_threads(config, trained)[0][-1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int], tuple[float, float]]:
    """A function that returns what one process does with a recipe, scales and tokens of a sequence."""

    @cache
    def known(recipe: str, scale: str, length: int) -> tuple[float, float]:
        model = WIDE | {"seq_length": length}
        return curve(configured(tmp_path_factory.mktemp("alone"), recipe, model, fp8__scale=scale))

    return known


@pytest.mark.parametrize(
    ("recipe", "scale", "layout"),
    only_quick_rows(
        [(*each, layout) for each in RECIPES for layout in LAYOUTS],
        ("nvfp4", "fp32", "tp2"), ("rowwise", "pow2", "tp2 sp"),
    ),
)  # fmt: skip
def test_layouts_are_the_same_run(
    recipe: str, scale: str, layout: str, alone: Callable[[str, str, int], tuple[float, float]], tmp_path: Path
) -> None:
    config = configured(tmp_path, recipe, WIDE, **LAYOUTS[layout], fp8__scale=scale)
    assert curve(config) == pytest.approx(alone(recipe, scale, config.model.seq_length), rel=1e-10)


FREEZE = ["layers.*.attention.*.weight", "layers.0.*", "layers.*.mlp.down.weight"]


@pytest.mark.parametrize(
    ("recipe", "layout"),
    only_quick_rows([(recipe, layout) for recipe in NAMES for layout in LAYOUTS], ("rowwise", "pp2 zb_h1")),
)
def test_layouts_with_frozen_weights_are_the_same_run(recipe: str, layout: str, tmp_path: Path) -> None:
    keys = {"train__freeze": FREEZE} | LAYOUTS[layout]
    model = WIDE | {"seq_length": keys.pop("model__seq_length", 128)}
    ours, alone = (curve(configured(tmp_path, recipe, model, **each)) for each in (keys, {"train__freeze": FREEZE}))
    assert ours == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize("recipe", only_quick(["tensorwise", "nvfp4"], "tensorwise"))
def test_amaxes_of_a_rank_alone_change_the_run(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = curve(configured(tmp_path, recipe, WIDE))
    monkeypatch.setattr(fp8_linear, "all_reduce", lambda *_, **__: None)
    assert curve(configured(tmp_path, recipe, WIDE, parallel__tp=2)) != pytest.approx(alone, rel=1e-5)
