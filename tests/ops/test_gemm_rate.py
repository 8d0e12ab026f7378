"""The GEMM rate: what is counted, over which time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megascale.device import Device
from megascale.ops import gemm_rate as module
from megascale.ops.gemm_rate import gemm_rate

CPU = Device(torch.device("cpu"), "gloo")


def test_gemms_are_counted_over_the_time_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ticks a second at each look: looks before, at the loop's head, and at the end."""
    monkeypatch.setattr(module.time, "perf_counter", itertools.count().__next__)
    monkeypatch.setattr(module, "SIZE", 8)
    gemms: list[Any] = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: gemms.append(a.shape) or multiply(a, b, out=out))
    rate = gemm_rate(CPU, torch.float32, seconds=10)
    counted = len(gemms) - 1  # the first warms up
    assert set(gemms) == {torch.Size([8, 8])}
    assert counted == 4 * 9  # looks at seconds 1 to 9 go on, that at 10 ends
    assert rate == counted * 2 * 8**3 / 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_format_of_compute_is_measured(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIZE", 32)
    assert gemm_rate(CPU, dtype, seconds=0.0) == 0.0
    assert gemm_rate(CPU, dtype, seconds=0.01) > 0
