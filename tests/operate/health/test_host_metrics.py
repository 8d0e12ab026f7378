"""Metrics of the host: what every host has, and what only some have."""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import subprocess
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from megascale.operate.health import host_metrics, pause_frames
from megascale.operate.health.gpu_metrics import GpuMetrics
from megascale.operate.health.host_metrics import HostMetrics


def test_every_host_has_these(tmp_path: Path) -> None:
    metrics = HostMetrics(tmp_path).sample()
    assert {
        "cpu.percent",
        "cpu.load",
        "memory.available",
        "network.sent",
        "disk.run.free",
        "disk.run.size",
        "clock.error_s",
    } <= set(metrics)
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


def nvml(errors: Sequence[tuple[int, int]] = ()) -> types.SimpleNamespace:
    """NVIDIA's library with a healthy GPU, one without a sensor of its clock, and one that is lost. `errors`: pairs of
    GPU and Xid, in the order in which they happen.
    """
    coming = list(errors)

    def event(events: object, timeout_ms: int) -> types.SimpleNamespace:
        assert timeout_ms == 0
        if not coming:
            raise NVMLError  # timeout
        gpu, xid = coming.pop(0)
        return types.SimpleNamespace(device=gpu, eventData=xid)

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
        nvmlDeviceGetCurrPcieLinkWidth=lambda gpu: 16,
        nvmlEventTypeXidCriticalError=8,
        nvmlEventSetCreate=object,
        nvmlDeviceRegisterEvents=lambda gpu, kind, events: None,
        nvmlEventSetWait_v2=event,
        nvmlDeviceGetIndex=lambda gpu: gpu,
    )


def test_gpus_and_one_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_metrics, "load_nvml", nvml)
    metrics = HostMetrics().sample()
    assert metrics["gpu0.percent"] == 97
    assert metrics["gpu0.power_w"] == 650
    assert metrics["gpu0.clock_mhz"] == 1980
    assert "gpu1.clock_mhz" not in metrics
    assert metrics["gpu1.temperature"] == 61
    assert metrics["gpu0.pcie_width"] == 16
    assert metrics["gpu2.lost"] == 1


def test_a_gpu_that_answers_nothing_is_lost_and_ends_no_sample() -> None:
    """NVML gives the handle of a GPU that fell off the bus a while ago, or fails as a whole."""

    def fail(*_: object) -> None:
        raise NVMLError

    library = nvml()
    gpus = GpuMetrics(library)
    assert dict(gpus.sample())["gpu0.percent"] == 97
    for name in list(vars(library)):
        if name.startswith(("nvmlDeviceGet", "nvmlEventSetWait")) and "Handle" not in name:
            setattr(library, name, fail)
    found = {name: value for name, value in gpus.sample() if not name.endswith("xid")}
    assert found == {"gpu0.lost": 1.0, "gpu1.lost": 1.0, "gpu2.lost": 1.0}


def test_critical_errors_of_gpus_are_counted() -> None:
    gpus = GpuMetrics(nvml([(0, 31), (1, 79), (0, 48)]))
    metrics = dict(gpus.sample())
    assert (metrics["gpu0.xid"], metrics["gpu0.last_xid"]) == (2, 48)
    assert (metrics["gpu1.xid"], metrics["gpu1.last_xid"]) == (1, 79)
    again = dict(gpus.sample())
    assert again["gpu0.xid"] == 2


def test_a_library_without_events_of_errors() -> None:
    library = nvml()
    del library.nvmlEventSetCreate
    metrics = dict(GpuMetrics(library).sample())
    assert metrics["gpu0.percent"] == 97
    assert "gpu0.xid" not in metrics


@pytest.mark.skipif(shutil.which("ip") is None or os.geteuid() != 0, reason="needs root and iproute2")
def test_counters_of_a_network_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver of virtual links counts no pause frames, but others, in the same form."""
    name = f"ms{os.getpid() % 10**6}"
    subprocess.run(["ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}p"], check=True)
    try:
        names = pause_frames.counter_names(name)
        values = dict(zip(names, pause_frames.counters(name, len(names)), strict=True))
        assert values["peer_ifindex"] == socket.if_nametoindex(f"{name}p")
        (tmp_path / name / "device").mkdir(parents=True)
        assert pause_frames.PauseFrames(tmp_path).count() is None
        monkeypatch.setattr(pause_frames, "_PAUSE", re.compile("peer_ifindex"))
        assert pause_frames.PauseFrames(tmp_path).count() == values["peer_ifindex"]
    finally:
        subprocess.run(["ip", "link", "delete", name], check=True)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("rx_prio3_pause", True),
        ("tx_pfc_ena_frames_pri5", True),
        ("port.rx_priority_3_xoff", True),
        ("rx_global_pause", True),
        ("rx_prio3_pause_duration", False),
        ("rx_packets", False),
    ],
)
def test_names_of_pause_counters(name: str, counts: bool) -> None:
    assert bool(pause_frames._PAUSE.fullmatch(name)) == counts
