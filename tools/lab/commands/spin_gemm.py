"""GEMMs of large models beside thread blocks that spin, as posted receives do, with and without a carve-out of SMs.

A figure is the time relative to the GEMM alone, the median and the largest over shapes. On a CPU nothing spins.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

from lab.spinning import Spin
from megascale.bench.gemm import GemmShape, gemm_fn
from megascale.bench.quartiles import intervals
from megascale.device import Device, detect_device

SHAPES = (
    GemmShape(2048, 12288, 4608), GemmShape(2048, 1536, 12288), GemmShape(2048, 12288, 6144),
    GemmShape(2048, 6144, 12288), GemmShape(8192, 4096, 6144), GemmShape(8192, 4096, 28672),
    GemmShape(8192, 14336, 4096),
)  # fmt: skip
"""Forward GEMMs of a layer of gpt3-175b with tp 8, and of llama3-8b."""

BLOCKS = (1, 2, 4, 8, 16)
REPEATS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--device", choices=("any", "cpu"), default="any", help="default %(default)s")


def run(options: argparse.Namespace) -> int:
    """Print a JSON object of the figures."""
    device = detect_device(allow_gpu=options.device == "any")
    shapes = [GemmShape(*(size // 32 for size in shape)) for shape in SHAPES] if device.is_cpu else SHAPES
    spin, figures = Spin(device), dict[str, str]()
    for name in ("bf16",) if device.is_cpu else ("bf16", "fp8_tensorwise", "fp8"):
        ratios: dict[str, list[float]] = {}
        for shape in shapes:
            multiply = gemm_fn(shape, name, device)
            alone = seconds(multiply, device, spin, 0, 0.0)
            for blocks in BLOCKS:
                for carve_out in (0, blocks):
                    with_out = f"{name} beside {blocks} blocks" + ", carve-out" * bool(carve_out)
                    take_all = device.leave_sms(carve_out)
                    beside = seconds(multiply, device, spin, blocks, 3 * REPEATS * alone + 0.002)
                    take_all()
                    ratios.setdefault(with_out, []).append(beside / alone)
        figures |= {
            label: f"{statistics.median(values):.3f}, at most {max(values):.3f}" for label, values in ratios.items()
        }
    print(json.dumps({"figures": figures}))
    return 0


def seconds(multiply: Callable[[], object], device: Device, spin: Spin, blocks: int, spinning: float) -> float:
    """Return the median seconds of a GEMM while `blocks` spin for `spinning` seconds."""
    multiply()
    device.synchronize()
    if blocks:
        spin.start(blocks, spinning)
    timer = device.timer()
    marks = [timer.mark()]
    for _ in range(REPEATS):
        multiply()
        marks.append(timer.mark())
    device.synchronize()
    return statistics.median(intervals(timer, marks))
