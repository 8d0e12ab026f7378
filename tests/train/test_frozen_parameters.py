"""Frozen parameters (`train.freeze`): they stay, cost no gradient and no state, and may be trained later."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.checkpoint import folders
from megascale.checkpoint.format import manifest
from megascale.core.rank import Rank
from megascale.core.storage import Location
from megascale.train.resume import load_initial_state
from tests.runs import GPT, LLAMA, build_run, config_of, curve_of, settings
from tests.worlds import run_world

FREEZE = ["embedding.*", "layers.[01].*", "layers.*.mlp.*", "layers.3.attention.[qkv].*"]


def named(run: Any) -> dict[str, torch.nn.Parameter]:
    return {name: p for chunk in range(len(run.stages)) for name, p in run.buffers.parameters(chunk).items()}


def gradients_of_a_step(rank: Rank, config: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], float]:
    """Gradients of the first step, weights before it and after three steps, and the first gradient norm."""
    run = build_run(rank, config)
    before = {name: p.detach().double().clone().numpy() for name, p in named(run).items()}
    norm = curve_of(run, 1)[0][1]
    gradients = {
        name: p.main_grad.double().clone().numpy() for name, p in named(run).items() if hasattr(p, "main_grad")
    }
    curve_of(run, 2)
    return gradients, before, {name: p.detach().double().clone().numpy() for name, p in named(run).items()}, norm


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "tied": (GPT, "fp64"),
    "untied": (LLAMA, "fp64"),
    "fp8": (LLAMA, "fp8"),
    "experts": (LLAMA | {"experts": 4, "experts_per_token": 2, "expert_ffn_size": 24, "dense_layers": 3}, "fp64"),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_the_others_are_as_without_frozen_ones(name: str, tmp_path: Path) -> None:
    model, precision = MODELS[name]
    keys = {"optimizer__clip_norm": 0.0, "optimizer__weight_decay": 0.5, "parallel__zero": 0}
    tree = settings(model, tmp_path, **keys, train__precision=precision)
    whole, *_ = run_world(1, gradients_of_a_step, config_of(tree, tmp_path))[0]
    tree["train"]["freeze"] = [*FREEZE, *(["layers.3.experts.down.*"] if "experts" in model else [])]
    gradients, before, after, norm = run_world(1, gradients_of_a_step, config_of(tree, tmp_path))[0]
    assert {name for name in before if name not in gradients} == {
        name for name in before if name.startswith(("embedding.", "layers.0.", "layers.1.")) or ".mlp." in name
    } | {name for name in before if name.startswith(("layers.3.attention.qkv", "layers.3.experts.down"))}
    assert all((gradients[name] == whole[name]).all() for name in gradients)
    squares = sum(float((gradient**2).sum()) for gradient in gradients.values())
    assert norm == pytest.approx(
        squares**0.5, rel=1e-12 if precision == "fp64" else 1e-6
    )  # the update has divided them by the tokens
    for name in before:
        assert (before[name] == after[name]).all() == (name not in gradients), name


def train_and_save(rank: Rank, config: Any, steps: int) -> tuple[list[str], str, list[tuple[float, float]]]:
    """Go on from the configured checkpoint, and save. Returns the names of the state, what was said, and the curve."""
    run = build_run(rank, config)
    text = load_initial_state(run, lambda folder: pytest.fail(str(folder)))
    curve = curve_of(run, steps)
    run.checkpoints.save(run.progress)
    return sorted(run.optimizer.global_tensors()), text, curve


def test_state_is_saved_of_trained_ones_alone_and_begins_at_zero(tmp_path: Path) -> None:
    """Saved in one layout, loaded in others: with the same list the run goes on, and without it says what is new."""
    layout = {"parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 2}
    keys = {"checkpoint__every": 100, "train__freeze": FREEZE, "train__precision": "fp64"}
    first = config_of(settings(LLAMA, tmp_path / "a", **layout, **keys), tmp_path)
    run_world(4, train_and_save, first, 2)
    path = folders.find_checkpoint(Location(str(first.folder)))
    saved = manifest.read(path)
    frozen = {name.removeprefix("weights.") for name in saved.tensors if name.startswith("weights.")} - {
        name.removeprefix("exp_avg.") for name in saved.tensors if name.startswith("exp_avg.")
    }
    weights = [name.removeprefix("weights.") for name in saved.tensors if name.startswith("weights.")]
    assert frozen == {name for name in weights if any(fnmatchcase(name, pattern) for pattern in FREEZE)}
    keys |= {"checkpoint__resume": str(path)}
    curves = []
    for folder, world, other in (("b", 4, layout), ("c", 1, {}), ("d", 2, {"parallel__dp": 2, "parallel__zero": 3})):
        config = config_of(settings(LLAMA, tmp_path / folder, **other, **keys), tmp_path)
        _, text, curve = run_world(world, train_and_save, config, 2)[0]
        assert "begins at zero" not in text
        curves.append(curve)
    for curve in curves[1:]:
        assert sum(curve, ()) == pytest.approx(sum(curves[0], ()), rel=1e-10)
    keys["train__freeze"] = ["embedding.*"]
    config = config_of(settings(LLAMA, tmp_path / "e", **keys), tmp_path)
    names, text, _ = run_world(1, train_and_save, config, 1)[0]
    assert "begins at zero: exp_avg, exp_avg_sq" in text
    assert "exp_avg.layers.0.mlp.up.weight" in names
