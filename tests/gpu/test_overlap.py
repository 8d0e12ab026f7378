"""What communication costs beside compute on several GPUs: reported, for choosing settings."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.bench.quartiles import intervals
from megascale.core.rank import Rank
from tests.gpu.conftest import Figure
from tests.gpu.machine import device_of, rehearsing, run_of, world_of
from tests.runs import GPT, config_of, settings

SHAPE = (2048, 12288, 3 * 12288 // 8)
"""The qkv GEMM of gpt3-175b with tp 8: tokens, k, n."""

LAYER = GPT | {"num_layers": 2, "hidden_size": 4096, "num_heads": 32, "vocab_size": 1024, "seq_length": 2048}
SMALL = {"hidden_size": 64, "num_heads": 4, "seq_length": 64}


def median_step(rank: Rank, config: Any, steps: int = 10) -> float:
    """Milliseconds of a step."""
    from megascale.train.step import train_step

    run, seconds = run_of(rank, config), []
    for _ in range(steps + 2):
        run.device.synchronize()
        start = time.perf_counter()
        train_step(run, run.train_loader.batch(run.progress.samples))
        run.device.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:]) * 1e3


WIDE = GPT | {"num_layers": 1, "hidden_size": 12288, "num_heads": 96, "vocab_size": 1024, "seq_length": 2048}
"""A layer of gpt3-175b."""


def step_of(folder: Path, world: int, model: dict[str, Any] = LAYER, **overrides: Any) -> float:
    small = SMALL | {"num_heads": 8} if rehearsing() else {}
    tree = settings(model | small, folder, **({"train__precision": "bf16"} | overrides))
    return max(world_of(world, median_step, config_of(tree, folder)))


@pytest.mark.gpu(2)
def test_tensor_parallel_gemms(tmp_path: Path, figure: Figure) -> None:
    layout = {"parallel__tp": 2, "parallel__sp": True, "batch__global": 4}
    figure("overlapped", step_of(tmp_path, 2, **layout), "ms")
    figure("one after the other", step_of(tmp_path, 2, **layout, overlap__tp=False), "ms")


@pytest.mark.timeout(300)
@pytest.mark.gpu(8)
@pytest.mark.parametrize("micro", [1, 4])
def test_a_layer_of_175b(micro: int, tmp_path: Path, figure: Figure) -> None:
    """With 256 rows a rank collectives are whole, with 1,024 symmetric memory fuses them with their GEMMs."""
    layout = {"parallel__tp": 8, "parallel__sp": True, "batch__micro": micro, "batch__global": 4 * micro}
    figure("overlapped", step_of(tmp_path, 8, WIDE, **layout), "ms")
    figure("one after the other", step_of(tmp_path, 8, WIDE, **layout, overlap__tp=False), "ms")
    if not rehearsing():
        figure("overlapped, fp8", step_of(tmp_path, 8, WIDE, **layout, train__precision="fp8"), "ms")


@pytest.mark.timeout(300)
@pytest.mark.gpu(2)
def test_ctas_of_pipeline_messages(tmp_path: Path, figure: Figure) -> None:
    """A posted receive holds an SM for each CTA of its communicator."""
    for ctas in (1, 2, 4):
        layout = {"parallel__pp": 2, "nccl__pp_ctas": [1, ctas]}
        figure(f"at most {ctas} CTAs", step_of(tmp_path, 2, **layout), "ms")


def gemm_beside_a_receive(rank: Rank) -> tuple[float, float]:
    """Milliseconds of a GEMM alone, and on rank 0 while a receive waits for its message."""
    import torch
    import torch.distributed as dist

    device, (tokens, k, n) = device_of(rank), SHAPE
    x, weight = (torch.randn(rows, k, dtype=torch.bfloat16, device=device.torch_device) for rows in (tokens, n))
    message = torch.zeros(3 << 20, dtype=torch.bfloat16, device=device.torch_device)
    timer = device.timer()

    def gemms() -> list[Any]:
        marks = [timer.mark()]
        for _ in range(20):
            torch.mm(x, weight.t())
            marks.append(timer.mark())
        return marks

    def milliseconds(marks: list[Any]) -> float:
        device.synchronize()
        return statistics.median(intervals(timer, marks)) * 1e3

    alone = milliseconds(gemms())
    exchange = dist.isend if rank.rank else dist.irecv
    exchange(message, 1 - rank.rank).wait()  # connects the two
    if rank.rank:
        time.sleep(2)  # the receive waits meanwhile
        dist.isend(message, 0).wait()
        return alone, alone
    receiving = dist.irecv(message, 1)
    marks = gemms()
    receiving.wait()
    return alone, milliseconds(marks)


@pytest.mark.gpu(2, only=True)
def test_a_gemm_beside_a_pending_receive(figure: Figure) -> None:
    alone, beside = world_of(2, gemm_beside_a_receive)[0]
    figure("alone", alone, "ms")
    figure("beside a receive", beside, "ms")


@pytest.mark.gpu(1)
def test_host_time_of_a_layer(tmp_path: Path, figure: Figure) -> None:
    """A tiny hidden size leaves the host's time alone: forward and backward of one layer."""
    tiny = GPT | {"hidden_size": 64, "num_heads": 4, "seq_length": 64}
    times = []
    for layers in (2, 6):
        tree = settings(tiny | {"num_layers": layers}, tmp_path, train__precision="bf16")
        times.append(world_of(1, median_step, config_of(tree, tmp_path))[0])
    micro_batches = 8
    figure("a layer", (times[1] - times[0]) / 4 / micro_batches, "ms", most=1.2)
