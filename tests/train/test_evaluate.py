"""Evaluation: the same loss in every layout, and no effect on training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.core.rank import Rank
from tests.marks import only_quick
from tests.runs import GPT, build_run, config_of, settings
from tests.worlds import run_world

BATCH = 4

LAYOUTS: dict[str, dict[str, Any]] = {
    "micro2": {"batch__micro": 2},
    "dp2 zero2": {"parallel__dp": 2, "parallel__zero": 2},
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "tp2 sp pp2 vpp2": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2},
    "pp2 v": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "zb_v"},
}


def evaluations(rank: Rank, config: Any) -> list[tuple[float, ...]]:
    """(loss, tokens) of evaluations before training and after two steps, and (loss, norm) of the steps."""
    from megascale.train.evaluate import evaluate
    from megascale.train.step import train_step

    run, results = build_run(rank, config), []
    for _ in range(2):
        for _ in range(2):  # an evaluation does not affect the next
            record = evaluate(run)
            assert record.step == run.progress.step
            results.append((record.valid_loss, record.valid_tokens))
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        results.append((result.loss, result.grad_norm))
    record = evaluate(run)
    return [*results, (record.valid_loss, record.valid_tokens)]


def configured(folder: Path, **changes: Any) -> Any:
    changes |= {"model__dropout": 0.3, "train__eval_every": 5, "train__eval_steps": 3, "batch__global": BATCH}
    tree = settings(GPT, folder, **changes)
    return config_of(tree, folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, ...]]:
    return run_world(1, evaluations, configured(tmp_path_factory.mktemp("alone")))[0]


def test_an_evaluation_is_the_mean_over_the_same_tokens_each_time(alone: Any) -> None:
    before, before_repeated, _, after, after_repeated, _, last = alone
    assert before == before_repeated and after == after_repeated
    assert len({loss for loss, _ in (before, after, last)}) == 3, "training changes the loss"
    assert {tokens for _, tokens in (before, after, last)} == {3 * BATCH * GPT["seq_length"]}


@pytest.mark.parametrize("name", only_quick(LAYOUTS, "micro2", "dp2 zero2", "tp2 sp pp2 vpp2", "pp2 v"))
def test_every_layout_has_the_same_validation_loss(name: str, alone: Any, tmp_path: Path) -> None:
    config = configured(tmp_path, **LAYOUTS[name])
    for rank in run_world(config.world_size, evaluations, config):
        assert rank == [pytest.approx(expected, rel=1e-10) for expected in alone]


def trained(rank: Rank, config: Any) -> list[tuple[float, float]]:
    from tests.runs import curve_of

    return curve_of(build_run(rank, config), 2)


def test_evaluations_do_not_change_the_training(alone: Any, tmp_path: Path) -> None:
    (curve,) = run_world(1, trained, configured(tmp_path))
    assert curve == [alone[2], alone[5]]


def reference_loss(rank: Rank, config: Any) -> float:
    """Mean loss of the first three validation batches by a plain loop over samples."""
    import torch

    run = build_run(rank, config)
    total = tokens = 0.0
    with torch.no_grad():
        for index in range(3):
            batch = run.valid_loader.batch(BATCH * index)
            for row in range(BATCH):
                micro_batch = batch.micro_batches[row]
                total += float(run.stages[0](None, micro_batch).loss)
                tokens += micro_batch.labels.numel()
    return total / tokens


def test_the_loss_is_the_mean_over_the_validation_samples(alone: Any, tmp_path: Path) -> None:
    assert run_world(1, reference_loss, configured(tmp_path)) == [pytest.approx(alone[0][0], rel=1e-12)]
