"""Runs in low precision do not fail as those of published reports did: poison, lost updates, overlap, exports."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megascale.catalog.recipes import RECIPES
from megascale.cli.main import main
from megascale.config.run import RunConfig
from megascale.core.errors import DivergenceError
from megascale.ops.quantized import Quantized
from megascale.parallel.fp8_linear import Fp8Gemms
from tests.marks import only_quick, only_quick_rows
from tests.parallel.test_fp8_linear import configured
from tests.parallel.test_sharded_weights import TENSORS
from tests.runs import curve_of
from tests.thread_world import run_threads

OPERANDS = ("input", "weight", "gradient")


def until_it_fails(run: Any) -> tuple[str, bool]:
    """Train; return the error, and whether a weight or the optimizer's state has changed."""
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter

    before = [tensor.clone() for tensor in run.optimizer.flat_tensors()]
    try:
        train(run, Reporter(run.config, run.device, None, [], run.mesh.recorder))
        message = ""
    except DivergenceError as error:
        message = str(error)
    return message, not all(map(torch.equal, before, run.optimizer.flat_tensors()))


@pytest.mark.parametrize(
    ("recipe", "operand"),
    only_quick_rows(
        itertools.product(RECIPES.names(), OPERANDS),
        ("tensorwise", "input"), ("rowwise", "weight"), ("static", "gradient"),
    ),
)  # fmt: skip
def test_poison_in_an_operand_stops_the_run_and_saves_nothing(
    recipe: str, operand: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One element of one cast, after its amax is known."""

    def poisoned(run: Any) -> tuple[str, bool]:
        quantizer = run.fp8_state.recipe.rows[operand]
        kind, real, casts = type(quantizer), type(quantizer).encode, []

        def encode(self: Any, x: torch.Tensor, *given: Any, **more: Any) -> Quantized:
            if self is quantizer and not casts:
                casts.append(x := x.clone())
                x.view(-1)[x.numel() // 3] = float("inf")
            return real(self, x, *given, **more)

        monkeypatch.setattr(kind, "encode", encode)
        found = until_it_fails(run)
        assert casts
        return found

    config = configured(tmp_path, recipe, checkpoint__every=1)
    ((message, changed),) = run_threads(config, poisoned)
    assert "is not finite" in message or "the loss is nan" in message
    assert not changed and not list((config.folder / "checkpoints").glob("step-*"))


def history(run: Any) -> tuple[Any, torch.Tensor]:
    return curve_of(run, 3), run.fp8_state.history.clone()


def test_recomputation_leaves_the_amax_history_as_it_is(tmp_path: Path) -> None:
    plain, again = (
        run_threads(configured(tmp_path, "delayed", TENSORS, train__recompute=kind), history)[0]
        for kind in ("none", "full")
    )
    assert plain[0] == again[0] and torch.equal(plain[1], again[1]) and plain[1].any()


@pytest.mark.parametrize("recipe", only_quick(["tensorwise", "delayed", "rowwise"], "tensorwise"))
@pytest.mark.parametrize("zero", only_quick([1, 3], 3))
def test_overlapped_gathers_change_no_bit(recipe: str, zero: int, tmp_path: Path) -> None:
    def curve(run: Any) -> Any:
        return curve_of(run, 3)

    layout = {"parallel__dp": 2, "parallel__pp": 2, "parallel__zero": zero, "batch__global": 4}
    settings = ({}, {"overlap__dp": False}, {"overlap__dp": False, "overlap__pp": False})
    curves = [run_threads(configured(tmp_path, recipe, TENSORS, **layout, **each), curve) for each in settings]
    assert curves[0] == curves[1] == curves[2]


def updates(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, torch.Tensor], ...]:
    """Return by weight the update of its masters in a step, if a rank has all of them, and of its operand."""
    used: dict[str, list[torch.Tensor]] = {}
    real = Fp8Gemms._forward_weight

    def forward_weight(self: Fp8Gemms, weight: torch.Tensor) -> Quantized:
        operand = real(self, weight)
        used.setdefault(f"{self.name}.weight", []).append(operand.dequantize())
        return operand

    def masters(run: Any) -> dict[str, torch.Tensor]:
        tensors = run.optimizer.global_tensors()
        names = [name for name in run.fp8_state.weights if f"weights.{name}" in tensors]  # others are of several parts
        return {name: tensors[f"weights.{name}"].shards[0].data.clone() for name in names}

    def train(run: Any) -> dict[str, torch.Tensor]:
        before = masters(run)
        curve_of(run, 2)
        return {name: (after - before[name]).flatten() for name, after in masters(run).items()}

    monkeypatch.setattr(Fp8Gemms, "_forward_weight", forward_weight)
    wanted = run_threads(config, train)[0]
    monkeypatch.setattr(Fp8Gemms, "_forward_weight", real)
    return wanted, {name: (casts[-1] - casts[0]).flatten() for name, casts in used.items()}


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("layout", [{}, {"parallel__dp": 2, "parallel__zero": 3}], ids=str)
def test_operands_follow_their_master_weights(
    optimizer: str, layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The effective descent quality (Collage, arXiv 2405.03637) is positive: no weight stays while its master moves."""
    keys: dict[str, Any] = {"optimizer__name": optimizer, "optimizer__warmup_steps": 0}
    wanted, _ = updates(configured(tmp_path, "tensorwise", TENSORS, **keys), monkeypatch)
    _, effective = updates(configured(tmp_path, "tensorwise", TENSORS, **keys, **layout), monkeypatch)
    for name, change in wanted.items():
        quality = float(change @ effective[name]) / float(change.norm()) ** 2
        assert quality > 0.1, (name, quality)


def test_an_export_has_the_master_weights_in_full(tmp_path: Path) -> None:
    """No codes, and no scales that a reader could miss."""

    def saved(run: Any) -> torch.Tensor:
        curve_of(run, 2)
        run.checkpoints.save(run.progress)
        weight: torch.Tensor = run.optimizer.global_tensors()["weights.layers.1.mlp.down.weight"].shards[0].data
        return weight.clone()

    config = configured(tmp_path, "tensorwise", TENSORS, checkpoint__every=100)
    (master,) = run_threads(config, saved)
    assert main(["ckpt", "convert", str(config.folder), str(tmp_path / "hf")]) == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert {each.dtype for each in exported.values()} <= {torch.bfloat16, torch.float32}
    assert not [name for name in exported if "scale" in name]
    found = exported["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(found, master.view(found.shape).to(found.dtype))
