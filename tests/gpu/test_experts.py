"""Experts on GPUs: grouped GEMMs beside dense ones, waits of the host, layouts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.ops.grouped_gemm import RowGroups, grouped_gemm, grouped_wgrad, scaled_grouped_gemm
from megascale.ops.recipe import build_recipe
from megascale.ops.wgrad import torch_wgrad
from megascale.train.step import train_step
from tests.gpu.conftest import Figure
from tests.gpu.machine import curve_on, furthest, rehearsing, run_of, world_of
from tests.parallel.experts.test_expert_layouts import EXCHANGES, LAYOUTS, MIXTRAL, SHARED
from tests.runs import MLA, config_of, settings
from tests.train.test_prediction_steps import EXPERTS as DEEPER

LATENT = MIXTRAL | MLA

BIASED = MIXTRAL | {"bias": True, "router_bias": True, "activation": "clamped_swiglu"}
MODELS = ["mixtral", "shared", "biased", "latent attention", "multi-token prediction"]

EXPERTS, OUTPUTS, INPUTS = 8, 2048, 4096


def groups_of(counts: list[int], device: torch.device) -> RowGroups:
    return RowGroups(tuple(counts), torch.tensor(counts, device=device).cumsum(0).int())


def seconds(work: Callable[[], object]) -> float:
    """Seconds of a call on the device, the best of ten."""
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times[2:])


@pytest.mark.gpu(1, only=True)
@pytest.mark.parametrize("counts", [[3, 0, 17, 1, 0, 40, 2, 1], [0] * 7 + [64], [16] * 8])
def test_grouped_gemms_are_those_of_the_experts(counts: list[int]) -> None:
    device = torch.device("cuda")
    rows = sum(counts)
    x, grad = (torch.randn(rows, n, device=device).bfloat16() for n in (64, 32))
    weight, groups = torch.randn(EXPERTS, 32, 64, device=device).bfloat16(), groups_of(counts, device)
    slow = RowGroups(groups.counts, groups.ends.cpu())
    expected = grouped_gemm(x.float().cpu(), weight.float().cpu(), slow)
    torch.testing.assert_close(grouped_gemm(x, weight, groups).float().cpu(), expected, rtol=0.02, atol=0.05)
    total = torch.ones(EXPERTS, 32, 64, device=device)
    grouped_wgrad(total, grad, x, groups, torch_wgrad, add=True)
    expected = torch.ones(EXPERTS, 32, 64)
    grouped_wgrad(expected, grad.float().cpu(), x.float().cpu(), slow, torch_wgrad, add=True)
    torch.testing.assert_close(total.cpu(), expected, rtol=0.02, atol=0.1)


@pytest.mark.gpu(1, only=True)
@pytest.mark.parametrize("name", ["rowwise", "blockwise"])
def test_grouped_gemms_in_fp8_are_those_of_the_experts(name: str) -> None:
    """On compute capability 9.0 rowwise by torch's grouped GEMM."""
    recipe, counts = build_recipe(name), [3, 0, 17, 1, 0, 40, 2, 1]
    x, weight = torch.randn(64, 256).bfloat16(), torch.randn(EXPERTS * 128, 256).bfloat16()

    def product(device: torch.device) -> torch.Tensor:
        operands = recipe.rows["input"].encode(x.to(device)), recipe.rows["weight"].encode(weight.to(device))
        return scaled_grouped_gemm(*operands, groups_of(counts, device), torch.bfloat16, recipe.gemm).float().cpu()

    torch.testing.assert_close(product(torch.device("cuda")), product(torch.device("cpu")), rtol=0.02, atol=0.1)


@pytest.mark.gpu(1, only=True)
@pytest.mark.parametrize(("rows", "least"), [(1024, 85), (128, 60)])
def test_grouped_gemms_are_nearly_as_fast_as_a_dense_one(rows: int, least: float, figure: Figure) -> None:
    """Of as many FLOPs: all rows times one expert's matrix."""
    device = torch.device("cuda")
    x = torch.randn(rows * EXPERTS, INPUTS, device=device).bfloat16()
    weight, groups = (
        torch.randn(EXPERTS, OUTPUTS, INPUTS, device=device).bfloat16(),
        groups_of([rows] * EXPERTS, device),
    )
    dense, grouped = seconds(lambda: x @ weight[0].t()), seconds(lambda: grouped_gemm(x, weight, groups))
    figure(f"grouped of dense at {rows} rows an expert", 100 * dense / grouped, "%", least=least)


@pytest.mark.gpu(1, only=True)
def test_rows_move_nearly_as_fast_as_a_copy(figure: Figure) -> None:
    """The gather of a dispatch, of two slots a token."""
    x = torch.randn(16_384, INPUTS, device="cuda").bfloat16()
    order = torch.randperm(2 * len(x), device="cuda") // 2
    copied = x.repeat(2, 1)
    figure("gather of copy", 100 * seconds(copied.clone) / seconds(lambda: x[order]), "%", least=60)


def waits_of_a_step(rank: Rank, config: RunConfig) -> int:
    """Count the calls in the second step that wait for the device."""
    run = run_of(rank, config)
    train_step(run, run.train_loader.batch(0))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(run, run.train_loader.batch(8))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    "exchange",
    [
        pytest.param("", marks=pytest.mark.gpu(1, only=True)),
        *(pytest.param(it, marks=pytest.mark.gpu(2, only=True)) for it in EXCHANGES),
    ],
)
def test_the_host_waits_once_a_layer(exchange: str, tmp_path: Path) -> None:
    """For the row counts of a forward, of all blocks; in backward not at all, nor anywhere else in a step."""
    layout = {"parallel__dp": 2, "parallel__ep": 2} | EXCHANGES[exchange] if exchange else {}
    config = config_of(settings(SHARED, tmp_path, train__precision="bf16", **layout), tmp_path)
    layers = config.model.num_layers - config.model.dense_layers
    for waits in world_of(config.world_size, waits_of_a_step, config):
        assert waits <= layers * config.num_microbatches


@pytest.mark.gpu(2)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_exchanges_give_the_same_curve(exchange: str, tmp_path: Path, figure: Figure) -> None:
    common = {"train__precision": "fp32", "optimizer__lr": 1e-3, "parallel__dp": 2, "parallel__ep": 2}
    rows, other = (
        world_of(2, curve_on, config_of(settings(SHARED, tmp_path, **common, **keys), tmp_path), 4)[0]
        for keys in ({}, EXCHANGES[exchange])
    )
    difference = furthest(other, rows)
    figure("difference", difference)
    assert difference < 1e-5


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dp2 ep2", marks=pytest.mark.gpu(2)),
        pytest.param("pp2 dp2 ep2", marks=pytest.mark.gpu(4)),
        pytest.param("tp2 sp dp2 ep4", marks=pytest.mark.gpu(4)),
    ],
)
@pytest.mark.parametrize("model", [MIXTRAL, SHARED, BIASED, LATENT, DEEPER], ids=MODELS)
def test_the_curve_is_that_of_one_gpu(model: dict, name: str, tmp_path: Path, figure: Figure) -> None:
    common = {"train__precision": "fp32", "optimizer__lr": 1e-3}
    layout = {f"parallel__{key}": value for key, value in LAYOUTS[name].items()}
    alone = config_of(settings(model, tmp_path / "one", **common), tmp_path / "one")
    config = config_of(settings(model, tmp_path / "many", **common, **layout), tmp_path / "many")
    (expected,), found = world_of(1, curve_on, alone, 4), world_of(config.world_size, curve_on, config, 4)
    assert all(curve == found[0] for curve in found), "ranks disagree about loss or norm"
    difference = furthest(found[0], expected)
    figure("difference", difference)
    assert difference < 1e-5


@pytest.mark.gpu(1, only=True)
def test_two_hundred_steps_in_bf16_are_within_the_noise_of_seeds(tmp_path: Path, figure: Figure) -> None:
    def last_loss(precision: str, seed: int) -> float:
        keys = {"train__precision": precision, "train__seed": seed, "train__steps": 200, "optimizer__lr": 1e-3}
        (curve,) = world_of(1, curve_on, config_of(settings(SHARED, tmp_path, **keys), tmp_path), 200)
        return sum(loss for loss, _ in curve[-20:]) / 20

    exact = [last_loss("fp32", seed) for seed in (1, 2, 3)]
    difference = abs(last_loss("bf16", 1) - exact[0])
    figure("difference", difference, most=max(exact) - min(exact))


@pytest.mark.gpu(1)
def test_bf16_has_the_same_bits_twice(tmp_path: Path) -> None:
    precision = "fp32" if rehearsing() else "bf16"
    config = config_of(settings(MIXTRAL, tmp_path, train__precision=precision), tmp_path)
    assert world_of(1, curve_on, config, 4) == world_of(1, curve_on, config, 4)
