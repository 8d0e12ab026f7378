"""FP8 GEMMs of experts: a row's result is its own in any company, and layouts train equally."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.config.run import RunConfig
from megascale.ops.grouped_gemm import RowGroups
from megascale.ops.wgrad import torch_wgrad
from megascale.parallel.experts.dispatcher import Exchange, Packed
from megascale.parallel.experts.fp8_gemms import Fp8GroupedGemms
from megascale.parallel.experts.grouped_linear import HIGH_PRECISION_GROUPS
from tests.marks import only_quick, only_quick_rows
from tests.runs import LLAMA, build_run, config_of, curve_of, settings
from tests.thread_world import run_threads
from tests.worlds import run_world

MODEL = LLAMA | {
    "hidden_size": 128, "num_kv_heads": 4, "ffn_size": 256, "seq_length": 128, "experts": 4, "experts_per_token": 2,
    "expert_ffn_size": 128,
}  # fmt: skip
RECIPES = ("rowwise", "blockwise", "mxfp8")
SCALED = [*((recipe, "fp32") for recipe in RECIPES), ("rowwise", "pow2"), ("blockwise", "pow2")]
ROTATED = [("halo", "fp32"), ("halo", "pow2"), ("halo_int8", "pow2")]
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 ep2": {"parallel__dp": 2, "parallel__ep": 2},
    "dp2 ep1": {"parallel__dp": 2},
    "dp4 ep2 zero2": {"parallel__dp": 4, "parallel__ep": 2, "parallel__zero": 2},
}


def configured(folder: Path, recipe: str, **more: Any) -> RunConfig:
    more = {"train__precision": "fp8", "batch__global": 4, "train__steps": 4, "optimizer__lr": 1e-3} | more
    return config_of(settings(MODEL, folder, fp8__recipe=recipe, **more), folder)


def gemms_of(rank: Any, config: RunConfig) -> list[tuple[bool, bool]]:
    """For each layer: its experts have GEMMs of their own for up and down, and run in FP8."""
    experts = [layer.mlp for layer in build_run(rank, config).stages[0].layers.values()]
    return [(each._up_gemms is not each._down_gemms, isinstance(each._up_gemms, Fp8GroupedGemms)) for each in experts]


@pytest.mark.parametrize("recipe", [*RECIPES, "tensorwise"])
def test_recipes_with_scales_of_rows_serve_experts(recipe: str, tmp_path: Path) -> None:
    """But for the first and the last layer."""
    (found,) = run_world(1, gemms_of, configured(tmp_path, recipe))
    assert found == [(served := recipe in RECIPES and 0 < layer < 3, served) for layer in range(4)]


def rows_of_experts(run: Any) -> None:
    """Rows have the same results, bit by bit, alone with their expert and among others, near those in fp32."""
    run.fp8_state.begin_step(collect_stats=False)
    gemms = run.stages[0].layers["1"].mlp._up_gemms
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((40, 128), (4, 256, 128)))
    counts = 13, 0, 26, 1
    together = gemms.forward(x, weight, groups_of(counts))
    few = gemms.forward(x[20:33], weight, groups_of((0, 0, 13, 0)))
    assert torch.equal(together[20:33], few)
    exact = HIGH_PRECISION_GROUPS.forward(x.float(), weight.float(), groups_of(counts))
    error = (together.float() - exact).norm() / exact.norm()
    assert 0.005 < float(error) < 0.06
    grad = gemms.dgrad(together, weight, groups_of(counts))
    exact = HIGH_PRECISION_GROUPS.dgrad(together.float(), weight.float(), groups_of(counts))
    assert 0.005 < float((grad.float() - exact).norm() / exact.norm()) < 0.06
    assert gemms.forward(x[:0], weight, groups_of((0, 0, 0, 0))).shape == (0, 256)


def weights_of_experts(run: Any) -> None:
    """Gradients of weights are near those in fp32, added to what there is, and zero without rows."""
    run.fp8_state.begin_step(collect_stats=False)
    gemms, wide = run.stages[0].layers["1"].mlp._up_gemms, torch.float32
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator).bfloat16() for shape in ((40, 128), (40, 256)))
    before, groups = torch.ones(4, 256, 128), groups_of((13, 0, 26, 1))
    found, exact, added = torch.full_like(before, 7), torch.empty_like(before), before.clone()
    gemms.wgrad(found, grad, x, groups, torch_wgrad, add=False)
    gemms.wgrad(added, grad, x, groups, torch_wgrad, add=True)
    HIGH_PRECISION_GROUPS.wgrad(exact, grad.to(wide), x.to(wide), groups, torch_wgrad, add=False)
    torch.testing.assert_close(added, found + before)
    error, in_fp8 = float((found - exact).norm() / exact.norm()), run.fp8_state.recipe.facts["free_borders"]
    assert 0.005 < error < 0.06 if in_fp8 else error < 4e-3
    assert not found[1].any()


@pytest.mark.parametrize(("recipe", "scale"), SCALED + ROTATED)
def test_wgrad_is_in_fp8_with_scales_of_powers_of_two(recipe: str, scale: str, tmp_path: Path) -> None:
    run_threads(configured(tmp_path, recipe, fp8__scale=scale), weights_of_experts)


def groups_of(counts: tuple[int, ...]) -> RowGroups:
    return RowGroups(counts, torch.tensor(counts).cumsum(0).int())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_row_has_its_own_result(recipe: str, tmp_path: Path) -> None:
    run_threads(configured(tmp_path, recipe), rows_of_experts)


@pytest.mark.parametrize(("recipe", "scale"), only_quick_rows(SCALED, ("rowwise", "pow2")))
@pytest.mark.parametrize("layout", only_quick(LAYOUTS, "dp2 ep2"))
def test_layouts_train_equally(recipe: str, layout: str, scale: str, tmp_path: Path) -> None:
    """As close as dense layers in FP8."""
    keys = {"fp8__scale": scale}
    (alone,) = run_threads(configured(tmp_path, recipe, **keys), lambda run: curve_of(run, 2))
    for curve in run_threads(configured(tmp_path, recipe, **keys | LAYOUTS[layout]), lambda run: curve_of(run, 2)):
        for (loss, norm), (expected, expected_norm) in zip(curve, alone, strict=True):
            assert loss == pytest.approx(expected, rel=2e-3)
            assert norm == pytest.approx(expected_norm, rel=5e-2)


LARGEST_GAP = 0.01  # of the mean loss of the last two of six steps


def last_losses(config: RunConfig) -> float:
    (found,) = run_threads(config, lambda run: curve_of(run, 6))
    return sum(loss for loss, _ in found[-2:]) / 2


@pytest.mark.slow
def test_losses_stay_near_those_of_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor on the experts' results, as a scale that is lost, is found."""
    keys = {"train__steps": 6, "optimizer__lr": 3e-3}
    bf16 = last_losses(configured(tmp_path, "rowwise", train__precision="bf16", **keys))
    for recipe in RECIPES:
        assert abs(last_losses(configured(tmp_path, recipe, **keys)) - bf16) < LARGEST_GAP
    real = Fp8GroupedGemms.forward
    monkeypatch.setattr(Fp8GroupedGemms, "forward", lambda *given: real(*given) * 32)
    assert abs(last_losses(configured(tmp_path, "rowwise", **keys)) - bf16) > LARGEST_GAP


@pytest.mark.parametrize("dispatcher", only_quick(["all_to_all", "all_gather"], "all_to_all"))
@pytest.mark.parametrize("recipe", only_quick(RECIPES, "rowwise"))
def test_tokens_travel_as_the_codes_of_experts(
    recipe: str, dispatcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With power-of-two scales: bit by bit as rounded tokens that travel in bf16."""
    keys = LAYOUTS["dp2 ep2"] | {"moe__dispatcher": dispatcher, "moe__token_blocks": 2}
    keys |= {} if recipe == "mxfp8" else {"fp8__scale": "pow2"}
    config = configured(tmp_path, recipe, **keys)
    sent = list[torch.dtype]()
    send = Exchange.start

    def noted(self: Exchange, rows: Packed, *, backward: bool = False) -> None:
        send(self, rows, backward=backward)
        assert self.arriving is not None
        if self.to_experts and not backward:
            sent.append(self.arriving.rows.dtype)

    def rounded(self: Exchange, rows: Packed, *, backward: bool = False) -> None:
        if self.cast is not None and not backward:
            rows = rows._replace(rows=self.cast(rows.rows).decode())
            self.cast = None
        send(self, rows, backward=backward)

    monkeypatch.setattr(Exchange, "start", noted)
    ours = run_threads(config, lambda run: curve_of(run, 3))
    assert set(sent) == {torch.uint8, torch.bfloat16}  # the first and the last layer have no FP8
    monkeypatch.setattr(Exchange, "start", rounded)
    assert run_threads(config, lambda run: curve_of(run, 3)) == ours
