"""A run that is killed and resumed equals the uninterrupted run."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import Exit
from tests.jobs import Job, curve, finish, job_config
from tests.runs import GPT, LLAMA

LAYOUT: dict[str, Any] = {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2}
RUN: dict[str, Any] = {
    "train__steps": 12,
    "checkpoint__every": 3,
    "train__precision": "fp32",
    "model__dropout": 0.1,
    "optimizer__decay": "constant",  # so that a run of six steps is the first half of one of twelve
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """Curve of an uninterrupted run in LAYOUT."""
    return curve(finish(job_config(tmp_path_factory.mktemp("uninterrupted"), GPT, **LAYOUT, **RUN)))


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that ended after six steps."""
    folder = tmp_path_factory.mktemp("half")
    finish(job_config(folder, GPT, **LAYOUT, **RUN), "train.steps=6")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_kill_9_at_a_random_moment_and_resume(seed: int, uninterrupted: Any, tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **LAYOUT, **RUN)
    job, chance = Job(config), random.Random(seed)
    job.wait_for_step(chance.randrange(4, 11))
    time.sleep(chance.random() / 10)
    job.kill()
    assert job.steps()[-1]["step"] < 12
    assert curve(finish(config)) == uninterrupted


@pytest.mark.slow
def test_killed_before_any_checkpoint(uninterrupted: Any, tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **LAYOUT, **RUN)
    job = Job(config)
    job.wait_for_step(1)
    job.kill()
    assert curve(finish(config)) == uninterrupted


LAYOUTS = [
    ("parallel.tp=1", "parallel.sp=false", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=2", "parallel.zero=2"),
    ("parallel.tp=1", "parallel.sp=false", "parallel.pp=1", "parallel.vpp=1", "parallel.zero=0", "batch.micro=4"),
    ("parallel.tp=2", "parallel.sp=false", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=2"),
    ("parallel.tp=1", "parallel.sp=false", "parallel.pp=4", "parallel.vpp=1", "parallel.schedule=gpipe"),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_resume_in_another_layout(layout: tuple[str, ...], halfway: Path, uninterrupted: Any, tmp_path: Path) -> None:
    shutil.copytree(halfway / "runs", tmp_path / "runs")
    resumed = curve(finish(job_config(tmp_path, GPT, **LAYOUT, **RUN), *layout))
    assert resumed[:6] == uninterrupted[:6]
    for (step, *values), (expected_step, *expected) in zip(resumed, uninterrupted, strict=True):
        assert step == expected_step
        assert values == pytest.approx(expected, rel=2e-5)


@pytest.mark.slow
def test_a_partial_pipeline_resumes(tmp_path: Path) -> None:
    """What micro-batches skip starts anew in every step, also with another dp for as many micro-batches."""
    run = RUN | {"train__steps": 9, "train__precision": "fp64", "parallel__pp": 4, "parallel__skip_ratio": 0.5}
    alone = curve(finish(job_config(tmp_path / "alone", LLAMA, **run, batch__micro=2)))
    config = job_config(tmp_path / "stopped", LLAMA, **run, batch__micro=2)
    finish(config, "train.steps=3")
    finish(config, "train.steps=6")
    resumed = curve(finish(config, "parallel.dp=2", "batch.micro=1"))
    assert resumed[:6] == alone[:6]
    for (step, *values), (expected_step, *expected) in zip(resumed, alone, strict=True):
        assert step == expected_step
        assert values == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_ranks_that_share_sequences_resume_as_one_process_and_back(tmp_path: Path) -> None:
    run = RUN | {"model__dropout": 0.0, "train__steps": 9, "train__precision": "fp64"}
    alone = curve(finish(job_config(tmp_path / "alone", LLAMA, **run)))
    config = job_config(tmp_path / "shared", LLAMA, **run)
    finish(config, "parallel.cp=4", "parallel.cp_mode=usp", "parallel.cp_a2a_size=2", "train.steps=3")
    finish(config, "train.steps=6")
    resumed = curve(finish(config, "parallel.cp=2", "parallel.dp=2", "parallel.zero=2"))
    for (step, *values), (expected_step, *expected) in zip(resumed, alone, strict=True):
        assert step == expected_step
        assert values == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_ranks_that_share_sequences_resume_as_a_pool_and_as_one_process(tmp_path: Path) -> None:
    documents = {"data__attention_mask": "document", "data__document_length": 5}
    run = RUN | documents | {"model__dropout": 0.0, "train__steps": 9, "train__precision": "fp64"}
    alone = curve(finish(job_config(tmp_path / "alone", LLAMA, **run)))
    config = job_config(tmp_path / "shared", LLAMA, **run)
    finish(config, "parallel.cp=4", "train.steps=3")
    hybrid = "parallel.hybrid_dp=true", "data.max_tokens_per_rank=4"  # a ring for documents of five tokens
    finish(config, "parallel.cp=2", "parallel.dp=2", *hybrid, "train.steps=6")
    resumed = curve(finish(config))
    for (step, *values), (expected_step, *expected) in zip(resumed, alone, strict=True):
        assert step == expected_step
        assert values == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_sigterm_finishes_the_step_saves_and_exits_143(uninterrupted: Any, tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **LAYOUT, **RUN)
    job = Job(config)
    job.wait_for_step(4)
    job.signal(signal.SIGTERM)
    status, out, err = job.end()
    assert status == Exit.STOPPED, err
    step = job.steps()[-1]["step"]
    assert step < 12
    assert f"saved {job.folder / 'checkpoints' / f'step-{step:08d}'}" in out.replace("\n", "")
    assert (job.folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").is_file()
    assert curve(finish(config)) == uninterrupted


@pytest.mark.slow
def test_bf16_resumes_bit_equal(tmp_path: Path) -> None:
    run = RUN | {"train__precision": "bf16", "parallel__dp": 2, "parallel__zero": 2}
    straight = curve(finish(job_config(tmp_path / "a", LLAMA, **run)))
    config = job_config(tmp_path / "b", LLAMA, **run)
    job = Job(config)
    job.wait_for_step(7)
    job.kill()
    assert curve(finish(config)) == straight


@pytest.mark.slow
def test_a_longer_run_continues_from_the_end_of_a_shorter_one(tmp_path: Path) -> None:
    straight = curve(finish(job_config(tmp_path / "a", GPT, **RUN)))
    config = job_config(tmp_path / "b", GPT, **RUN)
    assert len(finish(config, "train.steps=5")) == 5
    assert curve(finish(config)) == straight


@pytest.mark.slow
def test_a_finished_run_says_so(tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, **RUN | {"train__steps": 2, "optimizer__warmup_steps": 0})
    steps = finish(config)
    job = Job(config)
    status, out, _ = job.end()
    assert status == 0 and "all 2 steps are done: raise train.steps to continue" in out
    assert job.steps() == steps
