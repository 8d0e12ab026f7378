"""Which calls of a host wait for other streams of its GPU, by the loading of kernels and the allocator's segments; and
whether streams whose work waits hold up other streams, by the number of hardware queues.

Every call is timed while a kernel of another stream spins: a call that waits returns when the kernel has ended. A call
is the first of its kind in a process; `synchronize` shows that the method finds waits. On a CPU nothing spins.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab import LAB
from lab.spinning import Spin
from megascale.bench.gemm import GemmShape, gemm_fn
from megascale.catalog.recipes import TENSOR
from megascale.device import Device, detect_device
from megascale.ops.quantized import ElementFormat
from megascale.ops.wgrad import addmm_wgrad, torch_wgrad

SPIN_S = 0.3

LAZY, FIXED = {"CUDA_MODULE_LOADING": "LAZY"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
SETTINGS = {
    "eager": {"CUDA_MODULE_LOADING": "EAGER"},  # first: it compiles, and later processes load
    "lazy": LAZY,
    "fixed segments": LAZY | FIXED,
    "8 queues": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    "32 queues": {"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
}

SHAPES = ((2048, 12288, 4608), (8192, 4096, 14336), (8192, 14336, 4096), (256, 12288, 6144))
STREAMS = (4, 8, 16, 22, 31)

Call = Callable[[], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--device", choices=("any", "cpu"), default="any", help="default %(default)s")
    parser.add_argument("--setting", choices=SETTINGS, help="measure in this process, for one setting")


def run(options: argparse.Namespace) -> int:
    """Print a JSON object of the figures of all settings, each measured in a process of its own."""
    if options.setting:
        device = detect_device(allow_gpu=options.device == "any")
        print(json.dumps((streams if "queues" in options.setting else calls)(device)))
        return 0
    found: dict[str, list[str]] = {}
    for setting, env in SETTINGS.items():
        words = [sys.executable, LAB, "device-waits", "--device", options.device, "--setting", setting]
        default = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        done = subprocess.run(words, env=os.environ | default | env, stdout=subprocess.PIPE, text=True, check=False)
        failed = {"failed": f"status {done.returncode}"}
        for name, value in (failed if done.returncode else json.loads(done.stdout.splitlines()[-1])).items():
            found.setdefault(name, []).append(f"{setting}: {value}")
    print(json.dumps({"figures": {name: "; ".join(values) for name, values in found.items()}}))
    return 0


def calls(device: Device) -> dict[str, str]:
    """Return, by call, the milliseconds until it returned, and whether it waited."""
    spin, figures = Spin(device), dict[str, str]()
    warm = torch.ones(64, 64, dtype=torch.bfloat16, device=device.torch_device)
    (warm @ warm).sum().item()  # handles and workspaces, which a run's probes of operations make
    for name, prepare in prepared_calls(device):
        try:
            call = prepare()
            device.synchronize()
            spin.start(1, SPIN_S)
            begun = time.perf_counter()
            call()
            passed = time.perf_counter() - begun
            waited = "WAITED" if passed < 2 * SPIN_S else "unclear, as it is slow:"  # it compiles, say
            verdict = "returned" if device.is_cpu or spin.runs() else waited
            figures[name] = f"{verdict} {passed * 1e3:.1f} ms"
        except (ImportError, RuntimeError, NotImplementedError) as error:
            figures[name] = f"not possible: {str(error).splitlines()[0][:80]}"
        device.synchronize()
    return figures


def prepared_calls(device: Device) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Yield the calls by name, each behind a function that prepares it."""
    on, scale = device.torch_device, 32 if device.is_cpu else 1
    wgrad = torch_wgrad if device.is_cpu else addmm_wgrad
    kept: dict[str, Any] = {}

    def matrix(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*(size // scale for size in sizes), device=on).to(dtype)

    def gemm(shape: tuple[int, int, int], name: str) -> Call:
        return gemm_fn(GemmShape(*(size // scale for size in shape)), name, device)

    def accumulation(add: bool) -> Call:
        grad, x, total = matrix(4096, 6144), matrix(4096, 2048), matrix(6144, 2048, dtype=torch.float32)
        return lambda: wgrad(total, grad, x, add)

    def attention() -> Call:
        q = matrix(32, 4096 * 128).view(1, -1, 4096 // scale, 128)
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    def cast() -> Call:
        from megascale.ops import cast_transpose

        x = matrix(4096, 4096)
        return lambda: cast_transpose.cast(x, None, TENSOR, ElementFormat.E4M3, True, None)

    def segment() -> Call:
        return lambda: kept.update(segment=torch.empty((2 << 30) // scale, dtype=torch.uint8, device=on))

    def release() -> Call:
        kept.clear()
        return device.release_memory

    yield "synchronize", lambda: device.synchronize
    yield "read of a number", lambda: matrix(64, 64).sum().item
    for shape in SHAPES:
        yield f"GEMM {GemmShape(*shape)}", partial(gemm, shape, "bf16")
    yield "FP8 GEMM", lambda: gemm(SHAPES[0], "fp8" if device.is_cpu else "fp8_tensorwise")
    yield "wgrad of the first micro-batch", lambda: accumulation(False)
    yield "wgrad of the second", lambda: accumulation(True)
    yield "attention", attention
    yield "Triton kernel", cast
    yield "pinned memory, 64 MB", lambda: lambda: device.host_buffers().allocate((64 << 20) // scale)
    yield "a segment of 2 GB", segment
    yield "empty_cache", release


def streams(device: Device) -> dict[str, str]:
    """Return, by number of streams whose work waits, whether the compute issued afterwards waits, too."""
    figures = dict[str, str]()
    if device.is_cpu:
        return figures
    spin, x = Spin(device), torch.ones(2048, 2048, dtype=torch.bfloat16, device=device.torch_device)
    others = [torch.cuda.Stream(device.torch_device) for _ in range(max(STREAMS))]
    parts = [torch.ones(1, device=device.torch_device) for _ in others]
    for count in STREAMS:
        x @ x
        device.synchronize()
        spin.start(1, SPIN_S)
        for stream, part in zip(others[:count], parts, strict=False):
            with torch.cuda.stream(stream):
                stream.wait_event(spin.end)
                part.add_(1)
        done = torch.cuda.Event()
        x @ x
        done.record()
        begun = time.perf_counter()
        done.synchronize()
        verdict = "ran" if spin.runs() else "WAITED"
        figures[f"compute beside {count} streams"] = f"{verdict} {(time.perf_counter() - begun) * 1e3:.1f} ms"
        device.synchronize()
    return figures
