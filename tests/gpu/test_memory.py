"""Memory of a GPU: flat over many steps, as planned, and an error rather than a hang where it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.core.errors import Exit
from megascale.core.rank import Rank
from megascale.plan.account.memory import JobMemory
from tests.gpu.conftest import Figure
from tests.gpu.machine import rehearsing, run_of, world_of
from tests.jobs import Job, job_config
from tests.runs import GPT, LLAMA, config_of, settings

pytestmark = pytest.mark.gpu(1)

MIDDLE = LLAMA | {
    "num_layers": 8, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 8, "ffn_size": 5632, "vocab_size": 32000,
    "seq_length": 4096,
}  # fmt: skip
MIXTURE = MIDDLE | {"experts": 8, "experts_per_token": 2, "expert_ffn_size": 2816, "shared_ffn_size": 2816}


def steps(rank: Rank, config: Any, count: int) -> tuple[list[int], list[int], int]:
    """After each step, bytes that are allocated and marks that wait to become seconds; and the most bytes in use."""
    import torch

    from megascale.train.step import train_step

    run = run_of(rank, config)
    allocated, marks = [], []
    for _ in range(count):
        train_step(run, run.train_loader.batch(run.progress.samples))
        run.mesh.recorder.resolve_marks()
        run.device.synchronize()
        allocated.append(0 if run.device.is_cpu else torch.cuda.memory_allocated())
        marks.append(len(run.mesh.recorder._unresolved))
    return allocated, marks, run.device.peak_memory()


def test_fifty_steps_leave_nothing_behind(tmp_path: Path) -> None:
    config = config_of(settings(GPT, tmp_path, train__precision="bf16", train__steps=60), tmp_path)
    ((allocated, marks, _),) = world_of(1, steps, config, 50)
    assert len(set(allocated[2:])) == 1, "bytes in use after a step change"
    assert max(marks[10:]) <= max(marks[:10]) + 8, "marks pile up"


@pytest.mark.gpu(1, only=True)
@pytest.mark.parametrize("model", [MIDDLE, MIXTURE], ids=["dense", "experts"])
def test_the_peak_is_as_planned(model: dict[str, Any], tmp_path: Path, figure: Figure) -> None:
    overrides = {"train__precision": "bf16", "train__steps": 3, "batch__global": 4}
    config = config_of(settings(model, tmp_path, **overrides), tmp_path)
    ((_, _, peak),) = world_of(1, steps, config, 3)
    planned = JobMemory(config).fullest().total
    figure("peak", peak / 2**30, "GiB")
    figure("planned", planned / 2**30, "GiB")
    assert peak == pytest.approx(planned, rel=0.05)


@pytest.mark.gpu(1, only=True)
def test_too_large_a_batch_ends_with_an_error(tmp_path: Path) -> None:
    large = MIDDLE | {"seq_length": 32768}
    config = job_config(tmp_path, large, train__precision="bf16", batch__micro=32, batch__global=32)
    status, _, err = Job(config).end()
    assert status == Exit.UNCLASSIFIED
    assert "out of memory" in err.lower()


def test_a_weight_that_is_not_a_number_ends_the_run(tmp_path: Path) -> None:
    config = config_of(settings(GPT, tmp_path, train__precision="fp32"), tmp_path)
    (error,) = world_of(1, spoilt, config)
    assert error.startswith("step 2: layers.0.mlp.up.weight has a weight that is not finite on rank 0")


def spoilt(rank: Rank, config: Any) -> str:
    from megascale.core.errors import DivergenceError
    from megascale.train.step import train_step

    run = run_of(rank, config)
    train_step(run, run.train_loader.batch(0))
    run.buffers.finish_param_gather()
    run.buffers.parameters(0)["layers.0.mlp.up.weight"].data[0, 0].fill_(float("nan"))
    with pytest.raises(DivergenceError) as caught:
        train_step(run, run.train_loader.batch(8))
    return str(caught.value)


def test_a_rehearsal_says_so() -> None:
    """What ran on CPU processes is never taken for a GPU's result."""
    import torch

    assert rehearsing() or torch.cuda.is_available()
