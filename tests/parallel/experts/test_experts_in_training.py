"""Experts in training: gradients, loads that are far from even, ties, and the state that balances them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from megascale.core.storage import Location
from megascale.operate.diagnose.slow.findings import findings
from megascale.operate.store.node_rows import RankRows, Texts, take_rows
from megascale.operate.store.query import open_store
from megascale.operate.store.table_files import TableFile, write_rows
from megascale.plan.account.step_totals import EXPERT_LOAD, vector_name
from megascale.record.log_reader import LogReader
from megascale.train.step import train_step
from tests.parallel.experts.test_expert_layouts import LAYOUTS, MIXTRAL, SHARED
from tests.runs import build_run, config_of, curve_of, settings
from tests.worlds import run_world

Box = tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]


def config(model: dict[str, Any], folder: Path, layout: str = "", **changes: Any) -> RunConfig:
    parallel = {f"parallel__{key}": value for key, value in LAYOUTS.get(layout, {}).items()}
    return config_of(
        settings(
            model, folder, **{"train__steps": 2, "optimizer__warmup_steps": 0, "parallel__zero": 0} | parallel | changes
        ),
        folder,
    )


def gradients(rank: Rank, of: RunConfig) -> list[Box]:
    """The boxes of all gradients of the last step on this rank, without replicas of other tp ranks' rows."""
    run = build_run(rank, of)
    curve_of(run, of.train.steps)
    boxes: list[Box] = []
    for parameter, spec in run.buffers.shards():
        row = 0
        for tensor in spec.parts:
            offset, size = tensor.local_box(run.mesh.topology, run.mesh.coord)
            boxes.append((tensor.name, offset, size, parameter.main_grad[row : row + size[0]].numpy().copy()))
            row += tensor.local_shape(run.mesh.topology)[0]
    return boxes


@pytest.mark.parametrize("model", [MIXTRAL, SHARED], ids=["mixtral", "shared"])
def test_every_gradient_is_that_of_one_process(model: dict[str, Any], tmp_path: Path) -> None:
    """Expert gradients that are ep times too large would leave AdamW's loss curve as it is."""
    whole = {name: grad for name, _, _, grad in run_world(1, gradients, config(model, tmp_path))[0]}
    of = config(model, tmp_path, "tp2 sp dp2 ep4", parallel__zero=0)
    seen = dict.fromkeys(whole, 0)
    for name, offset, size, grad in (box for boxes in run_world(4, gradients, of) for box in boxes):
        expected = whole[name][tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        np.testing.assert_allclose(grad, expected, rtol=1e-10, atol=1e-13)
        seen[name] += grad.size
    assert all(seen[name] >= whole[name].size for name in whole), "every element has been compared"


def skewed(rank: Rank, of: RunConfig, kind: str) -> list[tuple[float, float, float]]:
    """Losses, gradient norms and largest loads of layer 1 of a run whose tokens all choose the same experts."""
    run, steps = build_run(rank, of), []
    for layer in (layer for stage in run.stages for layer in stage.layers.values()):
        if kind == "ties":
            layer.mlp.router.data.zero_()
        else:
            layer.mlp._experts.bias[:, 3] = 1e6
    for _ in range(of.train.steps):
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        steps.append((result.loss, result.grad_norm, result.totals[vector_name(EXPERT_LOAD, 1)]))
    return steps


@pytest.mark.parametrize("kind", ["one expert", "ties"])
def test_ranks_without_tokens_take_part(kind: str, tmp_path: Path) -> None:
    """All tokens choose expert 3, and equal scores the first experts: other ranks have no rows at all."""
    model = MIXTRAL | {"experts_per_token": 1, "balance_bias": True}
    changes = {"moe__bias_rate": 0.0, "train__steps": 1 if kind == "ties" else 2}
    (alone,) = run_world(1, skewed, config(model, tmp_path, **changes), kind)
    assert alone[0][2] == 8, "one of eight experts has all tokens"
    for steps in run_world(4, skewed, config(model, tmp_path, "dp4 ep4 zero2", **changes), kind):
        assert sum(steps, ()) == pytest.approx(sum(alone, ()), rel=1e-10)


def recorded(rank: Rank, of: RunConfig, store: Path) -> None:
    """Train a run whose tokens all choose expert 3, and store what rank 0's log has of loads."""
    run = build_run(rank, of)
    rows = RankRows(LogReader(run.mesh.recorder.log.memory)) if rank.rank == 0 else None
    for layer in (layer for stage in run.stages for layer in stage.layers.values()):
        layer.mlp._experts.bias[:, 3] = 1e6
    for step in range(of.train.steps):
        train_step(run, run.train_loader.batch(run.progress.samples))
        if rows is not None:
            rows.drain()
            columns = take_rows([rows], Texts())["expert_loads"]
            write_rows(Location(str(store)), TableFile("expert_loads", "n0", 0, 2 * step, 2 * step + 1), columns)


@pytest.mark.parametrize("layout", ["", "pp2 dp2 ep2"])
def test_an_expert_with_all_tokens_is_a_finding(layout: str, tmp_path: Path) -> None:
    model = MIXTRAL | {"experts_per_token": 1, "balance_bias": True}
    of = config(model, tmp_path, layout, moe__bias_rate=0.0, train__steps=3, train__log_every=1)
    run_world(of.world_size, recorded, of, tmp_path / "events")
    (finding,) = findings(open_store(tmp_path / "events"))
    assert str(finding).startswith("layer 0 expert 3: takes more tokens than its share, since step 1")
    loads = "expert 3 has 8 times the mean load; 7 of 8 experts have less than 0.1 of it"
    assert finding.evidence == tuple(f"layer {layer}: {loads}" for layer in range(4))


def biases(rank: Rank, of: RunConfig) -> list[float]:
    run = build_run(rank, of)
    curve_of(run, of.train.steps)
    bias: torch.Tensor = run.stages[0].layers["1"].mlp._experts.bias
    return bias.view(-1).tolist()


def test_biases_have_the_same_bits_in_every_layout(tmp_path: Path) -> None:
    """They follow counts, which are integers."""
    model, changes = SHARED | {"balance_bias": True}, {"moe__bias_rate": 0.01, "train__steps": 10}
    (alone,) = run_world(1, biases, config(model, tmp_path, **changes))
    assert any(alone)
    for found in run_world(4, biases, config(model, tmp_path, "tp2 sp dp2 ep4", **changes)):
        assert found == alone


def test_a_run_in_bf16_has_the_same_bits_twice(tmp_path: Path) -> None:
    of = config(SHARED, tmp_path, "dp2 ep2", train__precision="bf16", train__steps=4)
    assert run_world(2, curve, of) == run_world(2, curve, of)


def curve(rank: Rank, of: RunConfig) -> list[tuple[float, float]]:
    return curve_of(build_run(rank, of), of.train.steps)
