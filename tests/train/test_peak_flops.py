"""The peak in MFU's denominator: from the data sheet of a GPU, measured on a CPU and shared by its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megascale.catalog.accelerators import Peak
from megascale.comm.mesh import single_process_mesh
from megascale.core.rank import Rank
from megascale.device import Device
from megascale.ops import gemm_rate
from megascale.train import peak_flops
from tests.train.test_entry import a_run, on_gpu
from tests.worlds import run_world

CPU = Device(torch.device("cpu"), "gloo")


def test_the_source_names_processor_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_rate, "gemm_rate", lambda device, dtype, seconds: 7e9)
    peak = peak_flops.measure_peak_flops(CPU, torch.bfloat16, single_process_mesh())
    assert peak.flops == 7e9
    assert peak.source == f"{CPU.name} bfloat16, measured by GEMM"


def shared(rank: Rank) -> float:
    """The peak on a rank with a GEMM rate of rank + 1."""
    from megascale.comm.mesh import open_mesh
    from megascale.layout.topology import Topology

    gemm_rate.gemm_rate = lambda device, dtype, seconds: rank.rank + 1.0  # type: ignore[assignment]
    mesh = open_mesh(Topology(tp=1, cp=1, dp=3, pp=1), rank.rank, tied=False)
    return peak_flops.measure_peak_flops(CPU, torch.float32, mesh).flops


def test_ranks_share_the_mean_of_their_rates() -> None:
    assert run_world(3, shared) == [2.0, 2.0, 2.0]


def test_a_cpu_is_measured_and_a_gpu_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path, train__precision="bf16")
    measured: list[torch.dtype] = []
    monkeypatch.setattr(
        peak_flops, "measure_peak_flops", lambda device, dtype, mesh: measured.append(dtype) or Peak(1.0, "m")
    )
    assert peak_flops.find_peak_flops(run) == Peak(1.0, "m")
    assert measured == [torch.bfloat16]
    peak = peak_flops.find_peak_flops(on_gpu(run, "NVIDIA A100-SXM4-80GB", monkeypatch))
    assert peak is not None and peak.flops == 312e12
    assert len(measured) == 1
