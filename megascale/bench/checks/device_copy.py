"""Bandwidth between a GPU and the host's memory, in both directions, and within the GPU's memory."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megascale.bench.quartiles import intervals
from megascale.core.env_numbers import whole_number
from megascale.device import Device, detect_device
from megascale.operate.health.checks.result import CheckResult

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
