"""Metrics of this host for the driver: CPU, memory, disks, network, clock and GPUs, as numbers by name.

Counters are totals since the host's start; their reader takes differences. A metric that the host does not have is
absent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import types
from collections.abc import Iterator
from pathlib import Path

import psutil

from megascale.fault.observations import OomKills

INFINIBAND = Path("/sys/class/infiniband")
"""Ports of RDMA network cards, as PORT/ports/NUMBER/counters."""

_IB_COUNTERS = ("port_xmit_data", "port_rcv_data", "symbol_error", "link_downed", "link_error_recovery")
_CLOCK_UNSYNCHRONIZED = 0x0040  # STA_UNSYNC of adjtimex(2)
_CLOCK_IN_NANOSECONDS = 0x2000  # STA_NANO

Metrics = dict[str, float]


class HostMetrics:
    """Sample the metrics of the host. `folder`: a folder on the file system of the run."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._gpus = _load_nvml()
        psutil.cpu_percent()  # the first call has nothing to compare with

    def sample(self) -> Metrics:
        """Return the metrics by name."""
        metrics = dict(_host_metrics())
        for name, path in (("shm", Path("/dev/shm")), ("run", self._folder)):
            with contextlib.suppress(OSError):
                if path is not None:
                    metrics[f"disk.{name}.free"] = float(psutil.disk_usage(str(path)).free)
        metrics |= dict(_clock_metrics())
        metrics |= dict(_infiniband_metrics(INFINIBAND))
        if self._gpus is not None:
            metrics |= dict(_gpu_metrics(self._gpus))
        return metrics


def _host_metrics() -> Iterator[tuple[str, float]]:
    yield "cpu.percent", psutil.cpu_percent()
    yield "cpu.load", os.getloadavg()[0]
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    yield "memory.total", float(memory.total)
    yield "memory.available", float(memory.available)
    yield "memory.swapped_in", float(swap.sin)
    yield "memory.oom_kills", float(OomKills(os.getpid()).count)
    if (disk := psutil.disk_io_counters()) is not None:
        yield "disk.read", float(disk.read_bytes)
        yield "disk.written", float(disk.write_bytes)
    if (network := psutil.net_io_counters()) is not None:
        yield "network.sent", float(network.bytes_sent)
        yield "network.received", float(network.bytes_recv)
        yield "network.errors", float(network.errin + network.errout)
        yield "network.drops", float(network.dropin + network.dropout)


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def _clock_metrics() -> Iterator[tuple[str, float]]:
    """The kernel's account of the host's clock, which NTP or PTP keeps: offset and largest error, in seconds."""
    clock = _Timex()
    if ctypes.CDLL(None).adjtimex(ctypes.byref(clock)) < 0:
        return
    yield "clock.offset_s", clock.offset * (1e-9 if clock.status & _CLOCK_IN_NANOSECONDS else 1e-6)
    yield "clock.error_s", clock.maxerror * 1e-6
    yield "clock.synchronized", float(not clock.status & _CLOCK_UNSYNCHRONIZED)


def _infiniband_metrics(root: Path) -> Iterator[tuple[str, float]]:
    for port in sorted(root.glob("*/ports/*")):
        for counter in _IB_COUNTERS:
            with contextlib.suppress(OSError, ValueError):
                value = float((port / "counters" / counter).read_text(encoding="ascii"))
                yield f"infiniband.{port.parts[-3]}.{port.name}.{counter}", value
        with contextlib.suppress(OSError):
            yield f"infiniband.{port.parts[-3]}.{port.name}.active", float("ACTIVE" in (port / "state").read_text())


def _load_nvml() -> types.ModuleType | None:
    """Return NVIDIA's management library, ready for use; None on a host without it."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _gpu_metrics(nvml: types.ModuleType) -> Iterator[tuple[str, float]]:
    """Metrics of each GPU; those that a GPU does not have are absent."""
    reads = {
        "percent": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "memory.used": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
        "temperature": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "clock_mhz": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "throttle": nvml.nvmlDeviceGetCurrentClocksThrottleReasons,
        "ecc_uncorrected": lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(
            gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
    }
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError:
            yield f"gpu{index}.lost", 1.0
            continue
        for name, read in reads.items():
            with contextlib.suppress(nvml.NVMLError):
                yield f"gpu{index}.{name}", float(read(gpu))
