"""What only a GPU can show of the ledger: its times are the device's, and nothing in a step waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.comm import init
from megascale.core.rank import Rank
from megascale.device import Device, StreamTimer, detect_device
from megascale.record.events import COMPUTE
from megascale.record.recorder import MAX_MARKS_AT_ONCE
from megascale.train.build import build_mesh, build_rank_run
from megascale.train.evaluate import evaluate
from megascale.train.step import train_step
from megascale.train.stop import StopRequest
from tests.recorded_events import recorded_events
from tests.runs import GPT, LLAMA, config_of, settings

pytestmark = pytest.mark.gpu(1, only=True)

RANK = Rank(0, 1, 0, "localhost")


def test_marks_are_of_the_device() -> None:
    timer = StreamTimer(torch.device("cuda"))
    own = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    own[0].record()
    first = timer.mark()
    torch.cuda._sleep(100_000_000)
    second = timer.mark()
    own[1].record()
    assert timer.seconds(second) is None, "the device is not past it"
    torch.cuda.synchronize()
    begin, end = timer.seconds(first), timer.seconds(second)
    assert begin is not None and end is not None
    assert end - begin == pytest.approx(own[0].elapsed_time(own[1]) / 1e3, rel=0.01)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt": (GPT, {}),
    "llama": (LLAMA, {}),
    "gpt dropout": (GPT, {"model__dropout": 0.1}),
    "llama recompute selective": (LLAMA, {"train__recompute": "selective"}),
    "llama recompute full": (LLAMA, {"train__recompute": "full"}),
    "llama lamb": (LLAMA, {"optimizer__name": "lamb"}),
    **{
        f"llama fp8 {recipe}": (
            LLAMA | {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 512, "seq_length": 128},
            {"train__precision": "fp8", "fp8__recipe": recipe},
        )
        for recipe in ("tensorwise", "delayed", "rowwise")
    },
}


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    found = detect_device()
    init.init_distributed(RANK, found)
    yield found
    init.shutdown_distributed()


@pytest.mark.parametrize("case", CASES)
def test_a_step_and_an_evaluation_synchronise_with_nothing(case: str, device: Device, tmp_path: Path) -> None:
    """But with the event behind the numbers that each reads once, which torch does not call a synchronisation. What is
    compiled, and what is made once, was in a step and an evaluation before.
    """
    model, more = CASES[case]
    if "fp8" in case and device.capability < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9 or more")
    more = {"train__precision": "bf16", "train__eval_every": 5, "train__eval_steps": 2} | more
    config = config_of(settings(model, tmp_path, **more), tmp_path)
    run = build_rank_run(config, build_mesh(config, RANK, device), device, StopRequest())
    train_step(run, run.train_loader.batch(0))
    evaluate(run)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(run, run.train_loader.batch(8))
        evaluate(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    names = [event.name for event in recorded_events(run.mesh.recorder) if event.axis == COMPUTE and event.step == 2]
    assert names.count("F") == names.count("B") == 8


def test_records_settle_while_a_step_is_issued(device: Device, tmp_path: Path) -> None:
    """After many micro-batches few are left when the step returns."""
    config = config_of(settings(GPT, tmp_path, train__precision="bf16", batch__global=256), tmp_path)
    run = build_rank_run(config, build_mesh(config, RANK, device), device, StopRequest())
    for _ in range(2):
        train_step(run, run.train_loader.batch(run.progress.samples))
        run.mesh.recorder.resolve_marks()
    torch.cuda._sleep(1_000_000_000)  # the device is far behind
    train_step(run, run.train_loader.batch(run.progress.samples))
    assert len(run.mesh.recorder._unresolved) <= 2 * MAX_MARKS_AT_ONCE
