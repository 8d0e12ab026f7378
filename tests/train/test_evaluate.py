"""An evaluation: the same number in every layout, and no trace of it in the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.core.rank import Rank
from tests.runs import GPT, build_run, config_of, settings
from tests.worlds import run_world

LAYOUTS: dict[str, dict[str, Any]] = {
    "micro2": {"batch__micro": 2},
    "dp2 zero2": {"parallel__dp": 2, "parallel__zero": 2},
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "tp2 pp2 vpp2": {"parallel__tp": 2, "parallel__pp": 2, "parallel__vpp": 2},
}


def evaluations(rank: Rank, config: Any) -> list[tuple[float, ...]]:
    """Loss and tokens of evaluations before training and after each of two steps, and the steps' losses and norms."""
    from megascale.train.evaluate import evaluate
    from megascale.train.step import train_step

    run, found = build_run(rank, config), []
    for _ in range(2):
        for _ in range(2):  # an evaluation leaves nothing behind that another would see
            record = evaluate(run)
            assert record.step == run.progress.step
            found.append((record.valid_loss, record.valid_tokens))
        result = train_step(run, run.train.batch(run.progress.samples))
        found.append((result.loss, result.grad_norm))
    record = evaluate(run)
    return [*found, (record.valid_loss, record.valid_tokens)]


def configured(folder: Path, **more: Any) -> Any:
    tree = settings(GPT, folder, model__dropout=0.3, train__eval_every=5, train__eval_steps=3, **more)
    return config_of(tree, folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, ...]]:
    return run_world(1, evaluations, configured(tmp_path_factory.mktemp("alone")))[0]


def test_an_evaluation_is_the_mean_over_the_same_tokens_each_time(alone: Any) -> None:
    before, again, _, after, after_again, _, last = alone
    assert before == again and after == after_again
    assert len({loss for loss, _ in (before, after, last)}) == 3, "training changes it"
    assert {tokens for _, tokens in (before, after, last)} == {3 * 8 * GPT["seq_length"]}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_evaluates_alike(name: str, alone: Any, tmp_path: Path) -> None:
    config = configured(tmp_path, **LAYOUTS[name])
    for rank in run_world(config.world, evaluations, config):
        assert rank == [pytest.approx(expected, rel=1e-10) for expected in alone]


def trained(rank: Rank, config: Any) -> list[tuple[float, float]]:
    from tests.runs import curve_of

    return curve_of(build_run(rank, config), 2)


def test_evaluations_do_not_change_the_training(alone: Any, tmp_path: Path) -> None:
    (curve,) = run_world(1, trained, configured(tmp_path))
    assert curve == [alone[2], alone[5]]


def plainly(rank: Rank, config: Any) -> float:
    """The mean loss of the first three validation batches by a plain loop over samples."""
    import torch

    run = build_run(rank, config)
    total = tokens = 0.0
    with torch.no_grad():
        for index in range(3):
            batch = run.valid.batch(8 * index)
            for row in range(8):
                micro_batch = batch.micro_batch(row)
                total += float(run.stages[0](None, micro_batch))
                tokens += micro_batch.labels.numel()
    return total / tokens


def test_it_is_the_mean_loss_of_the_validation_samples(alone: Any, tmp_path: Path) -> None:
    assert run_world(1, plainly, configured(tmp_path)) == [pytest.approx(alone[0][0], rel=1e-12)]
