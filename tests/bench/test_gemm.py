"""The measured peak: what is counted, and that ranks share it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megascale.bench import gemm
from megascale.comm.mesh import single
from megascale.core.rank import Rank
from megascale.device import Device
from tests.worlds import run_world

CPU = Device(torch.device("cpu"), "gloo")


def test_products_are_counted_over_the_time_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ticks a second at each look: looks before, at the loop's head, and at the end."""
    monkeypatch.setattr(gemm.time, "perf_counter", itertools.count().__next__)
    monkeypatch.setattr(gemm, "SIZE", 8)
    products: list[Any] = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: products.append(a.shape) or multiply(a, b, out=out))
    rate = gemm.measure(CPU, torch.float32, seconds=10)
    counted = len(products) - 1  # the first warms up
    assert set(products) == {torch.Size([8, 8])}
    assert counted == 4 * 9  # looks at seconds 1 to 9 go on, that at 10 ends
    assert rate == counted * 2 * 8**3 / 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_format_of_compute_is_measured(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "SIZE", 32)
    assert gemm.measure(CPU, dtype, seconds=0.0) == 0.0
    assert gemm.measure(CPU, dtype, seconds=0.01) > 0


def test_the_source_names_processor_and_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "measure", lambda device, dtype: 7e9)
    peak = gemm.measured_peak(CPU, torch.bfloat16, single())
    assert peak.flops == 7e9
    assert peak.source == f"{CPU.name} bfloat16, measured by GEMM"


def shared(rank: Rank) -> float:
    """The peak of a rank whose own rate is rank + 1."""
    from megascale.comm.mesh import open_mesh
    from megascale.layout.topology import Topology

    gemm.measure = lambda device, dtype: rank.rank + 1.0
    mesh = open_mesh(Topology(tp=1, cp=1, dp=3, pp=1), rank.rank, tied=False)
    return gemm.measured_peak(CPU, torch.float32, mesh).flops


def test_ranks_share_the_mean_of_their_rates() -> None:
    assert run_world(3, shared) == [2.0, 2.0, 2.0]
