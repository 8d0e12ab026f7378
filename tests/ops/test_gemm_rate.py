"""The GEMM rate: counted GEMMs over elapsed time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megascale.device import Device
from megascale.ops import gemm_rate as module
from megascale.ops.gemm_rate import gemm_rate

CPU = Device(torch.device("cpu"), "gloo")


def test_gemms_are_counted_over_elapsed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances a second per reading: before the loop, at its head, and at the end."""
    monkeypatch.setattr(module.time, "perf_counter", itertools.count().__next__)
    monkeypatch.setattr(module, "SIZE", 8)
    gemms: list[Any] = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: gemms.append(a.shape) or multiply(a, b, out=out))
    rate = gemm_rate(CPU, torch.float32, seconds=10)
    counted = len(gemms) - 1  # the first warms up
    assert set(gemms) == {torch.Size([8, 8])}
    assert counted == 9  # readings 1 to 9 continue the loop, reading 10 ends it
    assert rate == counted * 2 * 8**3 / 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_compute_dtype_is_measured(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIZE", 32)
    assert gemm_rate(CPU, dtype, seconds=0.0) == 0.0
    assert gemm_rate(CPU, dtype, seconds=0.01) > 0
