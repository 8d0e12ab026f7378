"""Activation recomputation is bit-equal, and adds the collectives of the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megascale.catalog.recipes import RECIPES
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.model import mlp, modules
from megascale.parallel.fp8_state import CastStats
from megascale.parallel.recompute import recomputation, recompute_in_backward
from tests.marks import only_quick
from tests.parallel.test_tp_overlap import Outcome, outcome
from tests.recorded_events import forget_events
from tests.runs import (
    FAMILIES,
    GEMMA2,
    GPT,
    LLAMA,
    NEOX,
    OLMO2,
    build_run,
    builds,
    config_of,
    send_messages,
    settings,
    traffic_of,
    train_order,
)
from tests.worlds import run_world

EACH = ["attention", "norm", "activation"]
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "full, some layers": {"memory": ["full", "keep"]},
    **{op: {"recompute": "selective", "recompute_ops": [op]} for op in EACH},
    "all": {"recompute": "selective", "recompute_ops": EACH},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"parallel__tp": 2},
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "pp2 gpipe": {"parallel__pp": 2, "parallel__schedule": "gpipe"},
    "pp2 vpp2 dp2 zero2": {
        "parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 2, "batch__global": 8,
    },
    "tp2 sp pp2 vpp2": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2},
}  # fmt: skip
CASES = [
    {"model": GPT, "model__block": "serial", "model__dropout": 0.1, "train__precision": "fp32"},
    {"model": LLAMA, "model__block": "parallel", "model__dropout": 0.1, "train__precision": "fp32"},
    {"model": LLAMA, "model__block": "serial", "model__dropout": 0.0, "train__precision": "fp64"},
    {"model": GPT, "model__block": "parallel", "model__dropout": 0.0, "train__precision": "bf16"},
    {"model": LLAMA, "model__block": "serial", "model__window": [5, 0], "train__precision": "fp32"},
    {
        "model": LLAMA,
        "model__block": "parallel",
        "model__qk_norm": "full",
        "model__attention_softcap": 2.0,
        "train__precision": "bf16",
    },
    {"model": GEMMA2, "model__dropout": 0.1, "train__precision": "fp32"},
    {"model": OLMO2, "model__dropout": 0.1, "train__precision": "bf16"},
    {"model": OLMO2, "model__block": "fog", "model__qk_norm": "tanh", "train__precision": "bf16"},
    {"model": OLMO2, "model__unit_scaling": True, "model__qk_norm": "fixed", "train__precision": "fp32"},
    {"model": NEOX, "model__dropout": 0.1, "train__precision": "fp32"},
]
QUICK_CASES = [CASES[1], next(case for case in CASES if case["model"] == GEMMA2)]
FP8_MODEL = LLAMA | {"hidden_size": 256, "ffn_size": 512, "seq_length": 128, "num_layers": 3}


def configurations(
    cases: Sequence[dict[str, Any]], names: Sequence[str], folder: Path, **layout: Any
) -> list[RunConfig]:
    """Run cases with each of these settings."""
    results = []
    for case in cases:
        for setting in (SETTINGS[name] for name in names):
            more = {name: value for name, value in case.items() if name != "model"} | layout
            more |= {f"train__{key}": value for key, value in setting.items()}
            layers = 4 if "parallel__vpp" in layout else 2
            more = {"batch__micro": 2, "batch__global": 4, "model__num_layers": layers} | more
            results.append(config_of(settings(case["model"], folder, **more), folder))
    return results


def trained(rank: Rank, configs: list[RunConfig]) -> list[Outcome]:
    """Train every configuration, with tp groups that communicate by messages in small pieces."""
    from megascale.parallel import tp_overlap

    tp_overlap.MIN_PIECE_BYTES = 2000
    results = []
    for run in builds(rank, configs):
        if not results:
            send_messages(run.mesh.tp)
        results.append(outcome(run, 2))
    return results


def check_settings(
    cases: Sequence[dict[str, Any]], layout: str, folder: Path, names: Sequence[str] = (*SETTINGS,)
) -> None:
    configs = configurations(cases, names, folder, **LAYOUTS[layout])
    for outcomes in run_world(configs[0].world_size, trained, configs):
        for index in range(0, len(configs), len(names)):
            curve, weights = outcomes[index]
            for name, (other, theirs) in zip(names, outcomes[index:], strict=False):
                assert other == curve, (cases[index // len(names)], name)
                assert np.array_equal(theirs, weights)


def test_settings_are_bit_equal(tmp_path: Path) -> None:
    parallel, sandwich = QUICK_CASES
    check_settings([parallel], "tp2 sp", tmp_path)
    check_settings([sandwich], "tp2 sp", tmp_path, ["none", "full", "all"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_setting_is_bit_equal(layout: str, tmp_path: Path) -> None:
    check_settings(CASES, layout, tmp_path)


def fp8_configurations(folder: Path, **more: Any) -> list[RunConfig]:
    """All settings, with one layer of three in FP8."""
    more = {"train__precision": "fp8", "batch__global": 2, "model__dropout": 0.1} | more
    trees = [
        settings(FP8_MODEL, folder, **more, **{f"train__{key}": value for key, value in setting.items()})
        for setting in SETTINGS.values()
    ]
    return [config_of(tree, folder) for tree in trees]


IN_FP8 = [
    *((recipe, {"model__block": "serial"}) for recipe in RECIPES.names()),
    ("rowwise", {"fp8__scale": "pow2", "parallel__tp": 2, "parallel__sp": True}),
    ("tensorwise", {"model__block": "parallel", "parallel__tp": 2, "parallel__sp": True}),
    ("rowwise", {"model__block": "parallel", "parallel__tp": 2, "parallel__sp": True}),
    ("tensorwise", {"model__block": "sandwich", "parallel__tp": 2, "parallel__sp": True}),
    ("rowwise", {"model__block": "post_norm", "parallel__tp": 2, "parallel__sp": True}),
    ("tensorwise", {"model__block": "parallel_two_norms", "parallel__tp": 2, "parallel__sp": True}),
    (
        "tensorwise",
        {
            "model__qk_norm": "head", "model__head_dim": 32, "model__attention_softcap": 2.0, "model__qkv_bias": True,
            "model__rotary_fraction": 0.5, "parallel__tp": 2,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", only_quick(IN_FP8, IN_FP8[0]), ids=str)
def test_every_setting_is_bit_equal_in_fp8(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    recipe, layout = case
    configs = fp8_configurations(tmp_path, fp8__recipe=recipe, **layout)
    for outcomes in run_world(configs[0].world_size, trained, configs):
        curve, weights = outcomes[0]
        for name, (other, theirs) in zip(SETTINGS, outcomes, strict=True):
            assert other == curve, name
            assert np.array_equal(theirs, weights)


def test_cast_statistics_are_equal_with_recomputation(tmp_path: Path) -> None:
    configs = fp8_configurations(tmp_path, fp8__recipe="static")
    (results,) = run_world(1, cast_stats_of_runs, configs)
    assert results[0]
    for stats in results:
        assert stats.keys() == results[0].keys()
        for name, (*counted, rms, kurtosis) in ((name, astuple(each)) for name, each in stats.items()):
            *expected, first_rms, first_kurtosis = astuple(results[0][name])
            assert counted == expected, name
            # a recomputed layer adds the sums of each micro-batch twice, and additions round
            assert (rms, kurtosis) == pytest.approx((first_rms, first_kurtosis), rel=1e-14), name


def cast_stats_of_runs(rank: Rank, configs: list[RunConfig]) -> list[dict[str, CastStats]]:
    results = []
    for run in builds(rank, configs):
        run.buffers.begin_step()
        run.fp8_state.begin_step(collect_stats=True)
        run.pipeline.run_actions(train_order(run), run.train_loader.batch(0))
        results.append(run.fp8_state.take_cast_stats())
    return results


def traffic(rank: Rank, configs: list[RunConfig]) -> list[Any]:
    """Count (calls, bytes) over tp in a step."""
    from megascale.train.step import train_step

    results = []
    for run in builds(rank, configs):
        forget_events(run.mesh.recorder)
        train_step(run, run.train_loader.batch(0))
        results.append(traffic_of(run, step=1)["tp"])
    return results


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("sequence", only_quick([False, True], True))
def test_recomputation_adds_these_collectives(sequence: bool, block: str, tmp_path: Path) -> None:
    """Full recomputation adds, per layer, the reduction of attention's output and, with sp, the all-gathers.

    The block's last reduction is skipped, the only one of the parallel block. Selective recomputation adds none.
    """
    layout = {"parallel__tp": 2, "parallel__sp": sequence, "model__block": block, "train__precision": "fp32"}
    layout["batch__global"] = 2
    trees = [
        settings(FAMILIES["gpt"], tmp_path, **layout, **{f"train__{key}": value for key, value in setting.items()})
        for setting in SETTINGS.values()
    ]
    configs = [config_of(tree, tmp_path) for tree in trees]
    m, micro = configs[0].model, configs[0].num_microbatches
    layers, activation = micro * m.num_layers, 4 * m.seq_length * m.hidden_size
    serial = block == "serial"
    for results in run_world(2, traffic, configs):
        none, counts = results[0], dict(zip(SETTINGS, results, strict=True))
        assert counts["attention"] == counts["norm"] == counts["activation"] == counts["all"] == none
        extra_calls = {op: counts["full"][op][0] - none[op][0] for op in none}
        extra_bytes = {op: counts["full"][op][1] - none[op][1] for op in none}
        sums = layers if serial else 0
        if sequence:
            gathers = 2 * layers if serial else layers
            assert extra_calls == {"all_gather": gathers, "reduce_scatter": sums, "all_reduce": 0}
        else:
            assert extra_calls == {"all_reduce": sums}
        assert extra_bytes == {op: number * activation for op, number in extra_calls.items()}


def test_only_the_input_is_saved() -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def function(x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return x.sin().exp()

    calls: list[bool] = []
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = recompute_in_backward(function, x)
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr()]
    (grad,) = torch.autograd.grad(out.sum() * 2, x)
    assert calls == [False, True]
    torch.testing.assert_close(grad, 2 * x.cos() * x.sin().exp(), rtol=0, atol=1e-15)


def test_the_recomputed_output_may_differ() -> None:
    x = torch.randn(5, requires_grad=True)
    out = recompute_in_backward(lambda x: 3 * x, x, recompute=lambda x: 3 * x + 100)
    assert torch.equal(out, 3 * x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.full((5,), 3.0))


def test_an_evaluation_recomputes_nothing() -> None:
    calls = []
    with torch.no_grad():
        out = recompute_in_backward(lambda x: calls.append(1) or 2 * x, torch.ones(3, requires_grad=True))
    assert not out.requires_grad and calls == [1]


def test_a_recomputation_holds_no_graph() -> None:
    x = torch.ones(3, requires_grad=True) * 2
    recompute = recomputation(torch.exp, x, True)
    assert recompute is not None and not recompute.x.requires_grad
    assert torch.equal(recompute.function(recompute.x), x.exp())
    assert recomputation(torch.exp, x, False) is None


def surviving_tensors(rank: Rank, configs: list[RunConfig]) -> list[tuple[int, list[int]]]:
    """Count, by run, the tensors saved to recompute inputs of linear layers, and those of a layer and the layers above
    that are still alive after the layer's backward.
    """
    results = []
    for config in configs:
        run, saved, alive = build_run(rank, config), list[StorageWeakRef](), list[int]()

        def watched(function: Any, x: Tensor, wanted: bool, saved: list[StorageWeakRef] = saved) -> Any:
            saved.append(StorageWeakRef(x.untyped_storage()))
            return recomputation(function, x, wanted)

        def enter(_: Any, inputs: Any, saved: list[StorageWeakRef] = saved, alive: list[int] = alive) -> None:
            first = len(saved)
            inputs[0].register_hook(lambda grad: alive.append(sum(not each.expired() for each in saved[first:])))

        modules.recomputation = mlp.recomputation = watched
        (stage,) = run.stages
        for layer in stage.layers.values():
            layer.register_forward_pre_hook(enter)
        loss = stage(None, run.train_loader.batch(0).micro_batches[0]).loss
        assert not any(each.expired() for each in saved)
        loss.backward()
        results.append((len(saved), alive))
    return results


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_saved_tensors_are_freed_after_the_layers_backward(block: str, tmp_path: Path) -> None:
    """Freed layer by layer, although the loss still holds the graph."""
    more = {"model__block": block, "model__dropout": 0.1, "train__precision": "fp32"}
    more |= {f"train__{key}": value for key, value in SETTINGS["all"].items()}
    configs = [config_of(settings(FAMILIES[family], tmp_path, **more), tmp_path) for family in FAMILIES]
    for saved, alive in run_world(1, surviving_tensors, configs)[0]:
        assert saved == 4 * (3 if block == "serial" else 2)
        assert alive == [0, 0, 0, 0]
