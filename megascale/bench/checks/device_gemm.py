"""GEMM rate of the device, in the dtype of training: bf16 on a GPU, fp32 on a CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megascale.bench.gemm import GemmShape, measure_rates
from megascale.core.env_numbers import whole_number
from megascale.device import detect_device
from megascale.operate.health.checks.result import CheckResult

CPU_SIZE, GPU_SIZE = 768, 8192

GEMM_S = 0.5


def check_gemm(arguments: Mapping[str, Any]) -> CheckResult:
    """Measure square GEMMs for `gemm_s` seconds (default: GEMM_S); the value is the median rate."""
    device = detect_device(whole_number(os.environ, "LOCAL_RANK"))
    size, dtype = (CPU_SIZE, "fp32") if device.is_cpu else (GPU_SIZE, "bf16")
    seconds = float(arguments.get("gemm_s", GEMM_S))
    (measured,) = measure_rates([GemmShape(size, size, size)], [dtype], device, repeats=5, seconds=seconds)
    if measured.rate is None:
        return CheckResult("gemm", problem=f"{dtype}: {measured.unsupported_reason}", platform=device.name)
    details = {"shape": str(measured.shape), "dtype": dtype, "low": measured.rate.low, "high": measured.rate.high}
    return CheckResult("gemm", value=measured.rate.median, platform=device.name, details=details)
