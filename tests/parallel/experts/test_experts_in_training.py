"""Experts in training: gradients, loads that are far from even, ties, and the state that balances them."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale.config.run import RunConfig
from megascale.core.errors import MegascaleError
from megascale.core.rank import Rank
from megascale.core.storage import Location
from megascale.operate.diagnose.slow.findings import findings
from megascale.operate.store.node_rows import RankRows, Texts, take_rows
from megascale.operate.store.query import open_store
from megascale.operate.store.table_files import TableFile, write_rows
from megascale.ops.routing import count_choices
from megascale.parallel.experts import expert_parallel
from megascale.plan.account.step_totals import EXPERT_LOAD, vector_name
from megascale.record.log_reader import LogReader
from megascale.train.evaluate import evaluate
from megascale.train.run import StepResult
from megascale.train.step import train_step
from tests.marks import only_quick, only_quick_rows
from tests.parallel.experts.test_expert_layouts import LAYOUTS, MIXTRAL, SHARED
from tests.runs import build_run, config_of, curve_of, settings
from tests.thread_world import run_threads
from tests.train.test_skipped_steps import LENGTHS
from tests.train.test_skipped_steps import configure as without_labels
from tests.worlds import run_world

DISPATCHERS = ("all_to_all", "all_gather")
Box = tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]


SHORT = {"train__steps": 2, "batch__global": 4, "optimizer__warmup_steps": 0}


def config(model: dict[str, Any], folder: Path, layout: str = "", **changes: Any) -> RunConfig:
    parallel = {f"parallel__{key}": value for key, value in LAYOUTS.get(layout, {}).items()}
    return config_of(
        settings(model, folder, **SHORT | {"parallel__zero": 0} | parallel | changes),
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


@pytest.mark.parametrize("model", only_quick([MIXTRAL, SHARED], SHARED), ids=["mixtral", "shared"])
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


@pytest.mark.parametrize(
    ("kind", "dispatcher"),
    only_quick_rows(
        itertools.product(["one expert", "ties"], DISPATCHERS), ("one expert", "all_to_all"), ("ties", "all_gather")
    ),
)
def test_ranks_without_tokens_take_part(kind: str, dispatcher: str, tmp_path: Path) -> None:
    """All tokens choose expert 3, and equal scores the first experts: other ranks have no rows at all."""
    model = MIXTRAL | {"experts_per_token": 1, "router_normalize": False, "balance_bias": True}
    changes = {"moe__dispatcher": dispatcher, "moe__bias_rate": 0.0, "train__steps": 1 if kind == "ties" else 2}
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


@pytest.mark.parametrize("layout", only_quick(["", "pp2 dp2 ep2"], "pp2 dp2 ep2"))
def test_an_expert_with_all_tokens_is_a_finding(layout: str, tmp_path: Path) -> None:
    model = MIXTRAL | {"experts_per_token": 1, "router_normalize": False, "balance_bias": True}
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
    of = config(SHARED, tmp_path, "dp2 ep2", train__precision="bf16", train__steps=2)
    assert run_world(2, curve, of) == run_world(2, curve, of)


Steps = list[tuple[list[float], ...]]
"""The bias of the experts, their choices in the last step, and the weights, as a list of numbers each."""


def states(run: Any, *, evaluates: bool = False) -> tuple[Steps, list[StepResult]]:
    """Train. The state of the experts before the first step and after each, and the results of the steps."""
    experts = run.stages[0].layers["1"].mlp._experts
    found, results = [], []
    for step in range(run.config.train.steps + 1):
        if step:
            results.append(train_step(run, run.train_loader.batch(run.progress.samples)))
            run.buffers.finish_param_gather()
        if evaluates:
            evaluate(run)
        parts = experts.bias, experts.losses.before, *(shard.master for shard in run.optimizer.shards)
        found.append(tuple(part.flatten().tolist() for part in parts))
    return found, results


EXPERTS = {
    "model__experts": 8, "model__bias": False, "model__balance_bias": True, "moe__bias_rate": 0.05,
    "moe__balance": "step", "optimizer__warmup_steps": 0,
}  # fmt: skip


def test_a_skipped_step_leaves_the_state_of_experts(tmp_path: Path) -> None:
    """No label of the second step counts: its gradient is 0 / 0, while its tokens choose experts."""
    of = without_labels(tmp_path, LENGTHS, train__steps=3, parallel__dp=2, parallel__ep=2, **EXPERTS)
    for found, results in run_threads(of, states):
        assert [bool(result.totals["skipped"]) for result in results] == [False, True, False]
        assert found[2] == found[1] and all(
            new != old for step in (1, 3) for new, old in zip(found[step], found[step - 1], strict=True)
        )


def test_evaluation_counts_no_choices(tmp_path: Path) -> None:
    keys = EXPERTS | SHORT | {"train__eval_every": 5, "train__eval_steps": 1, "parallel__dp": 2, "parallel__ep": 2}
    of = config_of(settings(MIXTRAL, tmp_path, **keys), tmp_path)
    plain, evaluated = (run_threads(of, partial(states, evaluates=each)) for each in (False, True))
    assert [found for found, _ in plain] == [found for found, _ in evaluated]
    assert plain[0][0][0] != plain[0][0][1], "steps change the state"


@pytest.mark.parametrize(
    "exchange", [{}, {"moe__dispatcher": "all_gather", "moe__token_blocks": 2}], ids=["", "gathered"]
)
def test_recomputation_counts_choices_once(exchange: dict[str, Any], tmp_path: Path) -> None:
    keys = EXPERTS | SHORT | {"moe__z_loss_weight": 0.01, "parallel__dp": 2, "parallel__ep": 2} | exchange
    trees = [settings(MIXTRAL, tmp_path, train__recompute=each, **keys) for each in ("none", "full")]
    saved, recomputed = (run_threads(config_of(tree, tmp_path), states) for tree in trees)
    for (found, results), (again, others) in zip(saved, recomputed, strict=True):
        assert found == again and [result.totals for result in results] == [result.totals for result in others]


def test_a_lost_choice_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in production: tokens times experts a token are the sum of a layer's counts."""
    of = config_of(settings(MIXTRAL, tmp_path, train__steps=1, optimizer__warmup_steps=0), tmp_path)

    def lossy(chosen: torch.Tensor, size: int) -> torch.Tensor:
        counts = count_choices(chosen, size)
        counts[0, chosen[0, 0]] -= 1
        return counts

    monkeypatch.setattr(expert_parallel, "count_choices", lossy)
    with pytest.raises(MegascaleError, match="step 1 lacks choices of experts, or has too many"):
        run_threads(of, partial(curve_of, steps=1))


def test_the_share_of_dropped_slots_is_that_of_whole_slots(tmp_path: Path) -> None:
    """Three layers have experts, and their mean is no number of fp32."""
    of = config(SHARED, tmp_path, moe__capacity_factor=0.75)
    slots = of.batch.total * of.model.seq_length * of.model.experts_per_token * 3
    (dropped,) = run_threads(of, lambda run: train_step(run, run.train_loader.batch(0)).totals["dropped"] * slots)
    assert dropped > 3 and dropped == pytest.approx(round(dropped), rel=1e-14)


def test_a_stage_without_experts(tmp_path: Path) -> None:
    """All layers of the first stage are dense, and its ranks have no choices to count."""
    keys = EXPERTS | SHORT | {"model__dense_layers": 2}
    layout = {"parallel__pp": 2, "parallel__dp": 2, "parallel__ep": 2}
    trees = [settings(SHARED, tmp_path, **keys, **more) for more in ({}, layout)]
    (expected,), found = (run_threads(config_of(tree, tmp_path), partial(curve_of, steps=2)) for tree in trees)
    assert all(sum(each, ()) == pytest.approx(sum(expected, ()), rel=1e-10) for each in found)


EXTREMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as many ranks as experts": ({"experts": 4}, {"parallel__dp": 4, "parallel__ep": 4}),
    "sequences of one token": ({"seq_length": 1}, {"parallel__dp": 2, "parallel__ep": 2}),
}


@pytest.mark.parametrize(
    ("name", "dispatcher"),
    only_quick_rows(
        itertools.product(EXTREMES, DISPATCHERS),
        ("as many ranks as experts", "all_to_all"),
        ("sequences of one token", "all_gather"),
    ),
)
def test_extremes_are_the_same_run(name: str, dispatcher: str, tmp_path: Path) -> None:
    model, layout = EXTREMES[name]
    common = SHORT | {"moe__balance": "sequence", "moe__balance_weight": 0.5}
    trees = [settings(MIXTRAL | model, tmp_path, **common, **keys) for keys in ({}, layout)]
    trees[1]["moe"]["dispatcher"] = dispatcher
    (expected,), found = (run_threads(config_of(tree, tmp_path), partial(curve_of, steps=2)) for tree in trees)
    assert all(sum(each, ()) == pytest.approx(sum(expected, ()), rel=1e-10) for each in found)


def test_a_microbatch_without_labels_routes_its_tokens(tmp_path: Path) -> None:
    """Two samples of four have no label that counts; a rank has one of them, or both."""
    keys = {"train__steps": 2, "batch__global": 4, "moe__z_loss_weight": 0.1} | EXPERTS
    layouts = {}, {"parallel__dp": 2, "parallel__ep": 2}, {"parallel__dp": 4, "parallel__ep": 4}
    runs = [
        run_threads(without_labels(tmp_path / str(number), LENGTHS, **keys, **layout), partial(curve_of, steps=2))
        for number, layout in enumerate(layouts)
    ]
    for found in (*runs[1], *runs[2]):
        assert sum(found, ()) == pytest.approx(sum(runs[0][0], ()), rel=1e-10)


def curve(rank: Rank, of: RunConfig) -> list[tuple[float, float]]:
    return curve_of(build_run(rank, of), of.train.steps)
