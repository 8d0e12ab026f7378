"""Runs with experts in every layout: losses and gradient norms of steps equal those of one process."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from tests.marks import only_quick, only_quick_rows
from tests.runs import LLAMA, build_run, config_of, curve_of, settings
from tests.thread_world import run_threads
from tests.worlds import run_world

MIXTRAL = LLAMA | {"experts": 8, "experts_per_token": 2, "expert_ffn_size": 24}
SHARED = MIXTRAL | {
    "dense_layers": 1, "shared_ffn_size": 16, "shared_gate": True, "router_score": "sigmoid", "router_groups": 4,
    "router_top_groups": 2, "router_group_value": "top2", "router_scale": 2.5, "block": "post_norm",
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral": (MIXTRAL, {}),
    "sequence": (MIXTRAL, {"moe__balance": "sequence", "moe__balance_weight": 0.5, "moe__z_loss_weight": 0.01}),
    "group": (
        SHARED,
        {"moe__balance": "group", "moe__balance_group": 4, "moe__balance_weight": 0.5, "batch__micro": 2},
    ),
    "step": (MIXTRAL, {"moe__balance": "step", "moe__balance_weight": 0.5}),
    "capacity": (MIXTRAL, {"moe__capacity_factor": 0.75}),
    "bias": (SHARED | {"balance_bias": True}, {"moe__bias_rate": 0.05}),
    "frozen": (
        SHARED | {"bias": True},
        {
            "train__freeze": ["layers.1.experts.*", "layers.*.experts.down.weight", "layers.3.router.*", "layers.2.*"],
            "moe__balance": "step",
        },
    ),
    "biases": (SHARED | {"bias": True, "router_bias": True, "activation": "clamped_swiglu"}, {}),
}
"""Models and settings; the first is that of all meshes."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "zero": 0},
    "dp2 ep2": {"dp": 2, "ep": 2},
    "dp2 ep2 zero2": {"dp": 2, "ep": 2, "zero": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "pp2 v": {"pp": 2, "vpp": 2, "schedule": "zb_v"},
    "pp2 v dp2 ep2 zero2": {"pp": 2, "vpp": 2, "schedule": "zb_v", "dp": 2, "ep": 2, "zero": 2},
    "dp4 ep2": {"dp": 4, "ep": 2},
    "dp4 ep4 zero2": {"dp": 4, "ep": 4, "zero": 2},
    "dp4 ep2 zero3": {"dp": 4, "ep": 2, "zero": 3},
    "dp4 in twos, ep2 zero2": {"dp": 4, "dp_shard": 2, "ep": 2, "zero": 2},
    "dp4 in twos, zero3, state over all": {"dp": 4, "dp_shard": 2, "zero": 3, "state_shard": "all"},
    "pp2 v dp2 ep2 zero3": {"pp": 2, "vpp": 2, "schedule": "zb_v", "dp": 2, "ep": 2, "zero": 3},
    "tp2 sp dp2 ep4": {"tp": 2, "sp": True, "dp": 2, "ep": 4},
    "tp2 sp dp2 ep1 zero0": {"tp": 2, "sp": True, "dp": 2, "zero": 0},
    "cp2 dp2 ep4": {"cp": 2, "dp": 2, "ep": 4},
    "pp2 dp2 ep2": {"pp": 2, "dp": 2, "ep": 2, "zero": 0},
    "tp2 sp cp2 dp2 ep8": {"tp": 2, "sp": True, "cp": 2, "dp": 2, "ep": 8},
    "pp2 dp4 ep2": {"pp": 2, "dp": 4, "ep": 2},
    "tp2 sp pp2 dp2 ep4": {"tp": 2, "sp": True, "pp": 2, "dp": 2, "ep": 4},
    "tp2 sp pp2 dp2 ep2 zero2": {"tp": 2, "sp": True, "pp": 2, "dp": 2, "ep": 2, "zero": 2},
    "pp2 vpp2 dp4 ep4": {"pp": 2, "vpp": 2, "dp": 4, "ep": 4},
}
QUICK = ("tp2 sp dp2 ep4",)


SHORT = {"train__steps": 3, "batch__global": 4}
"""Of the quick suite: updates by the optimizer's first and second state, and every group of four samples."""

MUON = {"optimizer__name": "muon"}
OF_MUON = ("mixtral", "bias")
"""Quick cases with matrices of every shape: of experts, shared experts, and a dense layer."""


def configurations(folder: Path, layout: dict[str, Any], cases: Collection[str], **changes: Any) -> list[RunConfig]:
    parallel, configs = {f"parallel__{key}": value for key, value in layout.items()}, []
    for case in cases:
        model, moe = CASES[case]
        tree = settings(model, folder, **{"train__steps": 4} | parallel | moe | changes)
        if "balance_group" in tree.get("moe", {}):  # groups of four samples are of two ranks, or of one micro-batch
            tree["batch"]["micro"] = 4 // min(4, layout.get("dp", 1))
        configs.append(config_of(tree, folder))
    return configs


def train_all(rank: Rank, configs: list[RunConfig]) -> list[list[tuple[float, float]]]:
    mesh = build_run(rank, configs[0]).mesh
    return [curve_of(build_run(rank, config, mesh), config.train.steps) for config in configs]


Alone = Callable[..., list[list[tuple[float, float]]]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """A function that returns the curves of one process."""

    @cache
    def curves(*cases: str, **changes: Any) -> list[list[tuple[float, float]]]:
        return run_world(1, train_all, configurations(tmp_path_factory.mktemp("alone"), {}, cases, **changes))[0]

    return curves


def check(
    name: str,
    alone: Alone,
    folder: Path,
    cases: Collection[str] = tuple(CASES),
    run: Any = MappingProxyType({}),
    **how: Any,
) -> None:
    """Compare runs of these cases. `run`: what one process has too; `how`: what it does without."""
    configs = configurations(folder, LAYOUTS[name], cases, **run, **how)
    ranks = run_world(configs[0].world_size, train_all, configs)
    assert all(curves == ranks[0] for curves in ranks), "ranks disagree about the same sums"
    for curve, expected in zip(ranks[0], alone(*cases, **run), strict=True):
        assert [value for step in curve for value in step] == pytest.approx(
            [value for step in expected for value in step], rel=1e-10
        )


@pytest.mark.parametrize("name", QUICK)
def test_layouts_are_the_same_run(name: str, alone: Alone, tmp_path: Path) -> None:
    check(name, alone, tmp_path, run=SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_the_same_run(name: str, alone: Alone, tmp_path: Path) -> None:
    check(name, alone, tmp_path)


@pytest.mark.slow
def test_recomputation_chooses_the_same_experts(alone: Alone, tmp_path: Path) -> None:
    check("dp2 ep2", alone, tmp_path, train__recompute="full")


EXCHANGES: dict[str, dict[str, Any]] = {
    "all-gather": {"moe__dispatcher": "all_gather"},
    "blocks": {"moe__token_blocks": 4},
    "all-gather of blocks": {"moe__dispatcher": "all_gather", "moe__token_blocks": 2},
}
QUICK_EXCHANGES = (("dp2 ep2", "all-gather of blocks"), ("tp2 sp dp2 ep4", "blocks"))


@pytest.mark.parametrize(("name", "exchange"), only_quick_rows(QUICK_EXCHANGES, QUICK_EXCHANGES[0]))
def test_exchanges_are_the_same_run(name: str, exchange: str, alone: Alone, tmp_path: Path) -> None:
    check(name, alone, tmp_path, run=SHORT, train__recompute="full", **EXCHANGES[exchange])


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_exchange_is_the_same_run(name: str, exchange: str, alone: Alone, tmp_path: Path) -> None:
    check(name, alone, tmp_path, **EXCHANGES[exchange])


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [2, 8, 16])
def test_any_blocks_of_tokens_are_the_same_run(blocks: int, alone: Alone, tmp_path: Path) -> None:
    check("dp2 ep2", alone, tmp_path, moe__token_blocks=blocks)


MUON_LAYOUTS = ("dp2 ep2", "dp2 ep2 zero2", "pp2 dp2 ep2", "dp4 ep2", "tp2 sp dp2 ep4")


def test_muon_takes_the_same_steps(alone: Alone, tmp_path: Path) -> None:
    check("tp2 sp dp2 ep4", alone, tmp_path, OF_MUON, run=SHORT | MUON)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUON_LAYOUTS)
def test_muon_takes_the_same_steps_in_every_layout(name: str, alone: Alone, tmp_path: Path) -> None:
    check(name, alone, tmp_path, run=MUON)


GUARDED = {
    "train__steps": 8, "optimizer__zclip": True, "optimizer__zclip_warmup": 2, "optimizer__zclip_threshold": 0.5,
    "optimizer__skip_sigma": 0.2, "optimizer__skip_window": 2, "optimizer__clip_norm": 0.1,
}  # fmt: skip


def guarded(run: Any) -> tuple[list[tuple[float, float]], list[float], list[bool]]:
    """Train with guards: the curve, their state, and which steps left this rank's weights as they were."""
    curve, same = [], []
    for _ in range(8):
        before = [shard.master.clone() for shard in run.optimizer.shards]
        curve += curve_of(run, 1)
        same.append(all(bool((old == new.master).all()) for old, new in zip(before, run.optimizer.shards, strict=True)))
    return curve, [number for values in run.optimizer._guard.flat_tensors() for number in values.tolist()], same


@pytest.mark.parametrize("name", only_quick(["dp2 ep2", "tp2 sp dp2 ep4"], "tp2 sp dp2 ep4"))
def test_guards_of_steps_see_one_norm(name: str, tmp_path: Path) -> None:
    """Clipped and skipped steps are those of one process, on ranks with any experts."""
    layout = {f"parallel__{key}": value for key, value in LAYOUTS[name].items()}
    alone, split = (config_of(settings(MIXTRAL, tmp_path, **GUARDED, **more), tmp_path) for more in ({}, layout))
    ((curve, state, same),) = run_threads(alone, guarded)
    assert any(same) and not all(same)
    for found_curve, found_state, found_same in run_threads(split, guarded):
        assert sum(found_curve, ()) == pytest.approx(sum(curve, ()), rel=1e-10)
        assert found_state == pytest.approx(state, rel=1e-9) and found_same == same


def test_recomputation_of_a_gated_shared_expert(tmp_path: Path) -> None:
    """The gate's gradient needs the shared expert's output, also where a block adds it to the residual stream."""
    model = MIXTRAL | {"num_layers": 2, "shared_ffn_size": 16, "shared_gate": True}
    trees = [settings(model, tmp_path, train__steps=3, train__recompute=each) for each in ("none", "full")]
    saved, recomputed = run_world(1, train_all, [config_of(tree, tmp_path) for tree in trees])[0]
    assert recomputed == saved
