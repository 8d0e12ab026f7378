"""What only a GPU can show of the ledger: its times are the device's, and nothing in a step waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megascale.comm import init
from megascale.core.events import COMPUTE
from megascale.core.rank import Rank
from megascale.device import StreamTimer, detect
from megascale.train.build import build, mesh_of
from megascale.train.step import train_step
from megascale.train.stop import Stop
from tests.runs import GPT, config_of, settings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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


def test_a_step_with_the_ledger_synchronises_with_nothing(tmp_path: Path) -> None:
    """But with the event behind the five numbers that it reads, which torch does not call a synchronisation."""
    rank, device = Rank(0, 1, 0, "localhost"), detect()
    config = config_of(settings(GPT, tmp_path, train__precision="bf16"), tmp_path)
    init.start(rank, device)
    try:
        run = build(config, mesh_of(config, rank, device), device, Stop())
        train_step(run, run.train.batch(0))
        batch = run.train.batch(8)
        torch.cuda.set_sync_debug_mode("error")
        try:
            train_step(run, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        names = [event.name for event in run.mesh.recorder.events() if event.axis == COMPUTE and event.step == 2]
        assert names.count("F") == names.count("B") == 8
    finally:
        init.stop()
