"""Pipelines on GPUs end, whatever makes a rank wait for its device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.core.rank import Rank
from tests.gpu.conftest import Figure
from tests.gpu.machine import curve_on, furthest, run_of, world_of
from tests.jobs import Job, finish, job_config
from tests.runs import FAMILIES, GPT, config_of, curve_of, settings

PIPELINES: dict[str, dict[str, Any]] = {
    "1f1b": {"parallel__pp": 2},
    "interleaved": {"parallel__pp": 2, "parallel__vpp": 2},
}
TIGHT = 0.95
"""Share of a GPU's memory that is taken before the first step."""


@pytest.mark.gpu(2)
@pytest.mark.parametrize("schedule", PIPELINES)
def test_a_cold_start(schedule: str, tmp_path: Path) -> None:
    """Nothing is loaded or compiled when the first messages are posted."""
    cold = {
        "CUDA_MODULE_LOADING": "LAZY",
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    config = job_config(tmp_path, FAMILIES["llama"], train__precision="bf16", **PIPELINES[schedule])
    job = Job(config, env=cold)
    status, _, err = job.end()
    assert status == 0, err
    assert len(job.steps()) == 10


SERIAL = {
    "one hardware queue": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "every launch waits": {"CUDA_LAUNCH_BLOCKING": "1"},
    "kernels of communicators in the host's order": {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"},
}


@pytest.mark.gpu(2, only=True)
@pytest.mark.parametrize("how", SERIAL)
def test_work_one_after_the_other(how: str, tmp_path: Path) -> None:
    """Sends and receives hold up what is issued after them."""
    config = job_config(tmp_path, FAMILIES["llama"], train__precision="bf16", **PIPELINES["interleaved"])
    status, _, err = Job(config, env=SERIAL[how]).end()
    assert status == 0, err


def waiting(rank: Rank, config: Any, when: str) -> list[tuple[float, float]]:
    """The curve of a run in which every rank waits for its device: before each forward or each backward of each of its
    stages, or after every entry of its list, sends and receives included.
    """
    run = run_of(rank, config)

    def wait(*_: Any) -> None:
        run.device.synchronize()

    def wait_and_release() -> None:
        wait()
        release()

    release = run.pipeline.release_sent  # is called after every entry
    if when == "entry":
        run.pipeline.release_sent = wait_and_release
    for stage in run.stages:
        if when == "forward":
            stage.register_forward_pre_hook(wait)
        elif when == "backward":
            stage.register_full_backward_pre_hook(wait)
    return curve_of(run, 3)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("when", ["forward", "backward", "entry"])
@pytest.mark.parametrize("schedule", PIPELINES)
def test_waits_for_the_device(schedule: str, when: str, tmp_path: Path) -> None:
    """Both ranks wait."""
    config = config_of(settings(GPT, tmp_path, train__precision="bf16", **PIPELINES[schedule]), tmp_path)
    one, other = world_of(2, waiting, config, when)
    assert one == other


def squeezed(rank: Rank, config: Any) -> list[tuple[float, float]]:
    """The curve of a run on a device whose memory is nearly full."""
    import torch

    run = run_of(rank, config)
    free = run.device.free_memory() - (1 - TIGHT) * run.device.total_memory()
    taken = torch.empty(int(free), dtype=torch.uint8, device=run.device.torch_device)
    found = curve_of(run, 3)
    assert taken.numel()
    return found


@pytest.mark.gpu(2, only=True)
def test_little_memory_is_no_hang(tmp_path: Path) -> None:
    config = config_of(settings(GPT, tmp_path, train__precision="bf16", **PIPELINES["1f1b"]), tmp_path)
    one, other = world_of(2, squeezed, config)
    assert one == other


@pytest.mark.gpu(8)
def test_eight_stages(tmp_path: Path, figure: Figure) -> None:
    deep = GPT | {"num_layers": 8}
    alone = config_of(settings(deep, tmp_path / "1", train__precision="fp32", optimizer__lr=1e-3), tmp_path / "1")
    config = config_of(
        settings(deep, tmp_path / "8", train__precision="fp32", optimizer__lr=1e-3, parallel__pp=8), tmp_path / "8"
    )
    (expected,), found = world_of(1, curve_on, alone, 10), world_of(8, curve_on, config, 10)
    figure("difference", furthest(found[0], expected))
    assert furthest(found[0], expected) < 1e-5


@pytest.mark.timeout(300)
@pytest.mark.gpu(4)
def test_two_hundred_steps(tmp_path: Path, figure: Figure) -> None:
    common = {"train__precision": "fp32", "train__steps": 200, "optimizer__lr": 1e-3}
    expected = finish(job_config(tmp_path / "1", FAMILIES["llama"], **common))
    layout = {"parallel__tp": 2, "parallel__sp": True, **PIPELINES["interleaved"]}
    found = finish(job_config(tmp_path / "4", FAMILIES["llama"], **common, **layout))
    difference = furthest([[step["loss"]] for step in found], [[step["loss"]] for step in expected])
    figure("difference", difference)
    assert difference < 1e-3
