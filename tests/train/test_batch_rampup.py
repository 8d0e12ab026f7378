"""A run with a batch ramp-up: schedule, samples and learning rate follow, in every layout and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.cli.data_samples import step_range
from megascale.config.batch_rampup import batch_sizes
from megascale.config.run import RunConfig
from megascale.core.rank import Rank
from tests.jobs import curve, finish, job_config
from tests.runs import GPT, build_run, config_of, settings, train_order
from tests.worlds import run_world

RAMP: dict[str, Any] = {"batch__rampup": [2, 2, 12], "train__steps": 7, "optimizer__warmup_steps": 1}
SIZES = [2, 2, 4, 6, 8, 8, 8]
Course = list[tuple[float, float, int, int, float]]


def course(rank: Rank, config: RunConfig) -> Course:
    """Loss, gradient norm, loss tokens, samples and learning rate of each step."""
    from megascale.train.step import train_step

    run, found = build_run(rank, config), []
    for _ in range(config.train.steps):
        result = train_step(run, run.train_loader.batch(run.progress.samples))
        found.append((result.loss, result.grad_norm, result.loss_tokens, int(result.totals["samples"]), result.lr))
    run.buffers.finish_param_gather()
    run.pipeline.finish_sends()
    return found


def configure(folder: Path, **keys: Any) -> RunConfig:
    return config_of(settings(GPT, folder, **RAMP, optimizer__lr=1e-3, **keys), folder)


def test_a_run_is_the_same_in_another_layout(tmp_path: Path) -> None:
    config = configure(tmp_path)
    assert [batch_sizes(config.batch).at(sum(SIZES[:step])) for step in range(7)] == SIZES
    (alone,) = run_world(1, course, config)
    assert [samples for *_, samples, _ in alone] == SIZES
    assert [tokens for _, _, tokens, *_ in alone] == [16 * size for size in SIZES]
    rates = [rate for *_, rate in alone]
    assert rates[:3] == pytest.approx([1e-3 * 2 / 8, 1e-3 * 4 / 8, 1e-3]), "the warm-up is 8 samples"
    layout = {"parallel__pp": 2, "parallel__vpp": 2}
    for found in run_world(2, course, configure(tmp_path, **layout)):
        for step, expected in zip(found, alone, strict=True):
            assert step == pytest.approx(expected, rel=1e-10)


def test_a_step_has_the_schedule_of_its_batch(tmp_path: Path) -> None:
    run = build_run(Rank(0, 1, 0, "host"), configure(tmp_path))
    for size in (2, 4):
        smaller = config_of(settings(GPT, tmp_path, batch__global=size), tmp_path)
        assert run.order_of(size, True) == train_order(build_run(Rank(0, 1, 0, "host"), smaller))
        assert len(run.train_loader.batch({2: 0, 4: 4}[size]).micro_batches) == size
    assert len(train_order(run)) > len(run.order_of(4, True))


def test_the_samples_of_a_step_are_known(tmp_path: Path) -> None:
    config = configure(tmp_path)
    assert [step_range(batch_sizes(config.batch), config.folder, step) for step in range(1, 8)] == [
        (sum(SIZES[:step]), SIZES[step]) for step in range(7)
    ]


@pytest.mark.slow
def test_a_resume_is_exact(tmp_path: Path) -> None:
    """The run stops within the ramp-up and after it."""
    keys = {"checkpoint__every": 1, "train__precision": "fp32", "optimizer__decay": "constant", **RAMP}
    keys["optimizer__warmup_steps"] = 0
    whole = curve(finish(job_config(tmp_path / "whole", GPT, **keys)))
    config = job_config(tmp_path / "parts", GPT, **keys)
    for steps in (3, 5):
        finish(config, f"train.steps={steps}")
    assert curve(finish(config)) == whole
