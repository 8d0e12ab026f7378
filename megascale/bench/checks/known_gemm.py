"""GEMMs with a known bit pattern: a device that computes wrongly, without any error, has silent data corruption (SDC).

Operands are small integers, so every partial sum is exact in fp32 in any order, and a bf16 result is that sum rounded
once. The expected bits follow from integer arithmetic without a GEMM:

    a[i, l] = (i + l) mod P,  b[l, j] = (l x (j mod P)) mod P,  P prime, k a multiple of P

The rows of `a` and the columns of `b` repeat with period P: P x P sums are computed in Python's integers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megascale.core.env_numbers import whole_number
from megascale.device import detect_device
from megascale.operate.health.checks.result import CheckResult

PRIME = 13
"""Period of the operands. With k = PRIME x CPU_BLOCKS or GPU_BLOCKS, sums stay below 2^24."""

CPU_BLOCKS, GPU_BLOCKS = 32, 630
"""Sides of the matrices, in PRIME elements."""

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
    """Count the elements of a GEMM of side PRIME x `blocks` whose bits differ from the known ones."""
    index = torch.arange(PRIME * blocks, device=device)
    a = ((index.view(-1, 1) + index) % PRIME).to(dtype)
    b = ((index.view(-1, 1) * (index % PRIME)) % PRIME).to(dtype)
    expected = torch.tensor(_sums(blocks), dtype=torch.float64, device=device).to(dtype)  # exact, then rounded once
    return int((matmul(a, b) != expected.repeat(blocks, blocks)).sum())


def _sums(blocks: int) -> list[list[int]]:
    """Return the PRIME x PRIME distinct sums over PRIME x `blocks` terms."""
    period = range(PRIME)
    return [[blocks * sum((i + n) % PRIME * (n * j % PRIME) for n in period) for j in period] for i in period]
