"""Checks of a device alone: its GEMM rate, GEMMs with a known bit pattern, and copies between it and the host.

A device that computes wrongly, without any error, has silent data corruption (SDC): known GEMMs find it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megascale.bench.gemm import GemmShape, measure_rates
from megascale.bench.quartiles import intervals
from megascale.core.env_numbers import whole_number
from megascale.device import Device, detect_device
from megascale.operate.health.checks.result import CheckResult

GEMM_CPU_SIZE, GEMM_GPU_SIZE = 768, 8192

GEMM_S = 0.5


def check_gemm(arguments: Mapping[str, Any]) -> CheckResult:
    """Measure square GEMMs for `gemm_s` seconds (default: GEMM_S); the value is the median rate."""
    device = detect_device(whole_number(os.environ, "LOCAL_RANK"))
    size, dtype = (GEMM_CPU_SIZE, "fp32") if device.is_cpu else (GEMM_GPU_SIZE, "bf16")
    seconds = float(arguments.get("gemm_s", GEMM_S))
    (measured,) = measure_rates([GemmShape(size, size, size)], [dtype], device, repeats=5, seconds=seconds)
    if measured.rate is None:
        return CheckResult("gemm", problem=f"{dtype}: {measured.unsupported_reason}", platform=device.name)
    details = {"shape": str(measured.shape), "dtype": dtype, "low": measured.rate.low, "high": measured.rate.high}
    return CheckResult("gemm", value=measured.rate.median, platform=device.name, details=details)


PRIME = 13  # period of the operands of a known GEMM. With k = PRIME x CPU_BLOCKS or GPU_BLOCKS, sums stay below 2^24
CPU_BLOCKS, GPU_BLOCKS = 32, 630  # sides of the matrices, in PRIME elements

KNOWN_GEMM_S = 0.5

Matmul = Callable[[Tensor, Tensor], Tensor]


def check_known_gemm(arguments: Mapping[str, Any]) -> CheckResult:
    """Repeat GEMMs for `known_gemm_s` seconds (default: KNOWN_GEMM_S). The value is the number of wrong elements."""
    device = detect_device(whole_number(os.environ, "LOCAL_RANK"))
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    blocks = CPU_BLOCKS if device.is_cpu else GPU_BLOCKS
    dtypes = [torch.float32, torch.bfloat16]
    wrong, rounds = 0, 0
    deadline = time.perf_counter() + float(arguments.get("known_gemm_s", KNOWN_GEMM_S))
    while time.perf_counter() < deadline or rounds < len(dtypes):
        dtype = dtypes[rounds % len(dtypes)]
        wrong += wrong_elements(torch.mm, blocks, dtype, device.torch_device)
        rounds += 1
    problem = f"{wrong} elements of {rounds} GEMMs have wrong bits" if wrong else ""
    return CheckResult(
        "known_gemm", value=float(wrong), problem=problem, platform=device.name, details={"gemms": rounds}
    )


def wrong_elements(matmul: Matmul, blocks: int, dtype: torch.dtype, device: torch.device) -> int:
    """Count the elements of a GEMM of side PRIME x `blocks` whose bits differ from the known ones.

    Operands are small integers, so every partial sum is exact in fp32 in any order, and a bf16 result is that sum
    rounded once. The expected bits follow from integer arithmetic without a GEMM:

        a[i, l] = (i + l) mod P,  b[l, j] = (l x (j mod P)) mod P,  P prime, k a multiple of P

    The rows of `a` and the columns of `b` repeat with period P: P x P sums are computed in Python's integers.
    """
    index = torch.arange(PRIME * blocks, device=device)
    a = ((index.view(-1, 1) + index) % PRIME).to(dtype)
    b = ((index.view(-1, 1) * (index % PRIME)) % PRIME).to(dtype)
    period = range(PRIME)
    sums = [[blocks * sum((i + n) % PRIME * (n * j % PRIME) for n in period) for j in period] for i in period]
    expected = torch.tensor(sums, dtype=torch.float64, device=device).to(dtype)  # exact, then rounded once
    return int((matmul(a, b) != expected.repeat(blocks, blocks)).sum())


COPY_BYTES = 256 << 20
COPIES = 10


def check_device_copy(arguments: Mapping[str, Any]) -> CheckResult:
    """Copy COPY_BYTES between a GPU and pinned memory. The value is the rate of the slower direction."""
    device = detect_device(whole_number(os.environ, "LOCAL_RANK"))
    if device.is_cpu:
        return CheckResult("device_copy", skipped="no GPU", platform=device.name)
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    rates = {
        "to_host": _rate(device, lambda: host.copy_(source, non_blocking=True)),
        "to_device": _rate(device, lambda: target.copy_(host, non_blocking=True)),
        "within_device": _rate(device, lambda: target.copy_(source)),
    }
    problem = "" if torch.equal(target.cpu(), host) else "bytes differ after copies to the host and back"
    value = min(rates["to_host"], rates["to_device"])
    return CheckResult("device_copy", value=value, problem=problem, platform=device.name, details=rates)


def _rate(device: Device, copy: Callable[[], object]) -> float:
    copy()
    device.synchronize()
    timer = device.timer()
    marks = [timer.mark()]
    for _ in range(COPIES):
        copy()
        marks.append(timer.mark())
    device.synchronize()
    return COPY_BYTES / statistics.median(intervals(timer, marks))
