"""Runs with experts in every layout: losses and gradient norms of steps equal those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from tests.runs import LLAMA, build_run, config_of, curve_of, settings
from tests.worlds import run_world

MIXTRAL = LLAMA | {"experts": 8, "experts_per_token": 2, "expert_ffn_size": 24}
SHARED = MIXTRAL | {
    "dense_layers": 1, "shared_ffn_size": 16, "shared_gate": True, "router_score": "sigmoid", "router_groups": 4,
    "router_top_groups": 2, "router_group_value": "top2", "router_scale": 2.5, "block": "post_norm",
}  # fmt: skip
MODELS = {"mixtral": MIXTRAL, "shared": SHARED}

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "zero": 0},
    "dp2 ep2": {"dp": 2, "ep": 2},
    "dp2 ep2 zero2": {"dp": 2, "ep": 2, "zero": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "dp4 ep2": {"dp": 4, "ep": 2},
    "dp4 ep4 zero2": {"dp": 4, "ep": 4, "zero": 2},
    "tp2 sp dp2 ep4": {"tp": 2, "sp": True, "dp": 2, "ep": 4},
    "tp2 sp dp2 ep1 zero0": {"tp": 2, "sp": True, "dp": 2, "zero": 0},
    "cp2 dp2 ep4": {"cp": 2, "dp": 2, "ep": 4},
    "pp2 dp2 ep2": {"pp": 2, "dp": 2, "ep": 2, "zero": 0},
    "tp2 sp cp2 dp2 ep8": {"tp": 2, "sp": True, "cp": 2, "dp": 2, "ep": 8},
    "tp2 sp pp2 dp2 ep2 zero2": {"tp": 2, "sp": True, "pp": 2, "dp": 2, "ep": 2, "zero": 2},
    "pp2 vpp2 dp4 ep4": {"pp": 2, "vpp": 2, "dp": 4, "ep": 4},
}
QUICK = ("dp2 ep2", "tp2 sp dp2 ep4")


def configurations(folder: Path, layout: dict[str, Any], **changes: Any) -> list[RunConfig]:
    parallel = {f"parallel__{key}": value for key, value in layout.items()}
    trees = [settings(model, folder, train__steps=4, **parallel, **changes) for model in MODELS.values()]
    return [config_of(tree, folder) for tree in trees]


def train_all(rank: Rank, configs: list[RunConfig]) -> list[list[tuple[float, float]]]:
    mesh = build_run(rank, configs[0]).mesh
    return [curve_of(build_run(rank, config, mesh), config.train.steps) for config in configs]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[float, float]]]:
    return run_world(1, train_all, configurations(tmp_path_factory.mktemp("alone"), {}))[0]


def check(name: str, alone: list[list[tuple[float, float]]], folder: Path, **changes: Any) -> None:
    configs = configurations(folder, LAYOUTS[name], **changes)
    ranks = run_world(configs[0].world_size, train_all, configs)
    assert all(curves == ranks[0] for curves in ranks), "ranks disagree about the same sums"
    for curve, expected in zip(ranks[0], alone, strict=True):
        assert [value for step in curve for value in step] == pytest.approx(
            [value for step in expected for value in step], rel=1e-10
        )


@pytest.mark.parametrize("name", QUICK)
def test_layouts_are_the_same_run(name: str, alone: Any, tmp_path: Path) -> None:
    check(name, alone, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in QUICK])
def test_every_layout_is_the_same_run(name: str, alone: Any, tmp_path: Path) -> None:
    check(name, alone, tmp_path)


def test_recomputation_chooses_the_same_experts(alone: Any, tmp_path: Path) -> None:
    check("dp2 ep2", alone, tmp_path, train__recompute="full")


def test_recomputation_of_a_gated_shared_expert(tmp_path: Path) -> None:
    """The gate's gradient needs the shared expert's output, also where a block adds it to the residual stream."""
    model = MIXTRAL | {"num_layers": 2, "shared_ffn_size": 16, "shared_gate": True}
    trees = [settings(model, tmp_path, train__steps=3, train__recompute=each) for each in ("none", "full")]
    saved, recomputed = run_world(1, train_all, [config_of(tree, tmp_path) for tree in trees])[0]
    assert recomputed == saved
