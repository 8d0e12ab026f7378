"""What cannot work on GPUs is refused in one line, before any rank waits for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.core.errors import Exit
from megascale.device import gpu_count
from tests.jobs import Job, job_config
from tests.runs import GPT

pytestmark = pytest.mark.gpu(1, only=True)

PIPELINE = {"train__precision": "bf16", "parallel__pp": 2}


def refused(config: Path, *overrides: str, **environment: str) -> str:
    """The errors of a job that must end with the status of a user's mistake."""
    status, _, err = Job(config, *overrides, env=environment).end()
    assert status == Exit.CONFIG, err
    return err


def test_more_ranks_than_gpus(tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, train__precision="bf16")
    err = refused(config, f"parallel.dp={gpu_count() + 1}", f"batch.global={gpu_count() + 1}")
    assert f"local rank {gpu_count()} has no GPU" in err


def test_two_processes_that_see_one_gpu(tmp_path: Path) -> None:
    config = job_config(tmp_path, GPT, train__precision="bf16")
    assert "local rank 1 has no GPU: this host has 1" in refused(config, "parallel.dp=2", CUDA_VISIBLE_DEVICES="0")


@pytest.mark.gpu(2, only=True)
def test_waits_of_the_host(tmp_path: Path) -> None:
    variable = "TORCH_NCCL_BLOCKING_WAIT"
    assert variable in refused(job_config(tmp_path, GPT, **PIPELINE), **{variable: "1"})
