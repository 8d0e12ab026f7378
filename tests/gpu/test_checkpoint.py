"""Checkpoints of a GPU's state: pinned copies at the link's speed, exact while training goes on, resumed to the bit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from megascale.checkpoint.save.snapshot import Snapshot
from megascale.core.rank import Rank
from tests.gpu.conftest import Figure
from tests.gpu.machine import device_of, run_of, world_of
from tests.jobs import Job, curve, finish, job_config
from tests.runs import GPT, config_of, settings

pytestmark = pytest.mark.gpu(1)

RUN = {"train__precision": "bf16", "train__steps": 12, "checkpoint__every": 6, "optimizer__decay": "constant"}


def copied(rank: Rank, size: int) -> tuple[bool, float]:
    """Whether a snapshot's memory is pinned, and the bytes a second at which it is taken."""
    import torch

    device = device_of(rank)
    state = torch.arange(size // 4, dtype=torch.float32, device=device.torch_device)
    snapshot = Snapshot([state], device)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        snapshot.copy_from_tensors()
        seconds.append(time.perf_counter() - start)
    assert torch.equal(snapshot.buffer.view(torch.float32), state.cpu())
    return snapshot.buffer.is_pinned(), size / sorted(seconds)[2]


@pytest.mark.gpu(1, only=True)
def test_a_snapshot_is_pinned_and_copied_at_the_links_speed(figure: Figure) -> None:
    ((pinned, rate),) = world_of(1, copied, 2 << 30)
    figure("device to host", rate / 1e9, "GB/s", least=20)
    assert pinned


def saved_while_training(rank: Rank, config: Any) -> tuple[bool, int]:
    """Whether a checkpoint that is written while steps go on holds the state at which it began, and its step."""
    import torch

    from megascale.train.step import train_step

    run = run_of(rank, config)

    def state() -> list[Any]:
        return [t.clone() for shard in run.optimizer.shards for t in (shard.master, *shard.state.values())]

    def step() -> None:
        train_step(run, run.train_loader.batch(run.progress.samples))

    step()
    before = state()
    run.checkpoints.start_save(run.progress)
    for _ in range(5):
        step()
    saved = run.checkpoints.wait_for_save()
    assert saved is not None and saved.error is None
    found = run.checkpoints.resume()
    assert found is not None
    return all(map(torch.equal, before, state())), found.progress.step


def test_what_is_saved_while_training_goes_on_is_the_state_before(tmp_path: Path) -> None:
    config = config_of(settings(GPT, tmp_path, **RUN), tmp_path)
    assert world_of(1, saved_while_training, config) == [(True, 1)]


@pytest.mark.timeout(300)
def test_a_run_resumes_to_the_bit(tmp_path: Path) -> None:
    whole = curve(finish(job_config(tmp_path / "whole", GPT, **RUN)))
    halves = job_config(tmp_path / "halves", GPT, **RUN)
    finish(halves, "train.steps=6")
    assert curve(finish(halves)) == whole


@pytest.mark.timeout(300)
def test_a_killed_run_goes_on_from_memory(tmp_path: Path) -> None:
    overrides = RUN | {"checkpoint__every": 100, "checkpoint__in_memory_every": 1, "train__steps": 200}
    config = job_config(tmp_path, GPT, **overrides)
    job = Job(config)
    job.wait_for_step(5)
    job.kill()
    reached = job.steps()[-1]["step"]
    again = Job(config, f"train.steps={reached + 2}")
    status, out, err = again.end()
    assert status == 0, err
    assert "resumed from the copies in memory" in out
