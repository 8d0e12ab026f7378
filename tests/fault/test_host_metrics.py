"""Metrics of the host: what every host has, and what only some have."""

from __future__ import annotations

import math
import types
from pathlib import Path

import pytest

from megascale.fault import host_metrics
from megascale.fault.host_metrics import HostMetrics


def test_every_host_has_these(tmp_path: Path) -> None:
    metrics = HostMetrics(tmp_path).sample()
    assert {"cpu.percent", "cpu.load", "memory.available", "network.sent", "disk.run.free", "clock.error_s"} <= set(
        metrics
    )
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    assert not any(name.startswith("gpu") for name in metrics)
    assert 0 < metrics["memory.available"] < metrics["memory.total"]


def test_a_folder_that_is_gone_has_no_metric(tmp_path: Path) -> None:
    assert "disk.run.free" not in HostMetrics(tmp_path / "absent").sample()


def test_ports_of_network_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    (port / "counters" / "link_downed").write_text("2\n")
    (port / "state").write_text("1: DOWN\n")
    monkeypatch.setattr(host_metrics, "INFINIBAND", tmp_path)
    metrics = HostMetrics().sample()
    assert metrics["infiniband.mlx5_0.1.link_downed"] == 2
    assert metrics["infiniband.mlx5_0.1.active"] == 0


class NVMLError(Exception):
    pass


def nvml() -> types.SimpleNamespace:
    """NVIDIA's library with a healthy GPU, one without a sensor of its clock, and one that is lost."""

    def handle(index: int) -> int:
        if index == 2:
            raise NVMLError
        return index

    def clock(gpu: int, kind: int) -> int:
        if gpu == 1:
            raise NVMLError
        return 1980

    return types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetUtilizationRates=lambda gpu: types.SimpleNamespace(gpu=97),
        nvmlDeviceGetMemoryInfo=lambda gpu: types.SimpleNamespace(used=1 << 30),
        nvmlDeviceGetTemperature=lambda gpu, sensor: 61,
        nvmlDeviceGetPowerUsage=lambda gpu: 650_000,
        nvmlDeviceGetClockInfo=clock,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 4,
        nvmlDeviceGetTotalEccErrors=lambda gpu, kind, counter: 0,
    )


def test_gpus_and_one_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_metrics, "_load_nvml", nvml)
    metrics = HostMetrics().sample()
    assert metrics["gpu0.percent"] == 97
    assert metrics["gpu0.power_w"] == 650
    assert metrics["gpu0.clock_mhz"] == 1980
    assert "gpu1.clock_mhz" not in metrics
    assert metrics["gpu1.temperature"] == 61
    assert metrics["gpu2.lost"] == 1
