"""Metrics of this host for the driver: CPU, memory, disks, network, clock and GPUs, as numbers by name.

Counters are totals since the host's start; their reader takes differences. A metric that the host does not have is
absent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from megascale.operate.health.gpu_metrics import GpuMetrics, load_nvml
from megascale.operate.health.observations import OomKills
from megascale.operate.health.pause_frames import PauseFrames

INFINIBAND = Path("/sys/class/infiniband")  # ports of RDMA network cards, as PORT/ports/NUMBER/counters

_IB_COUNTERS = (
    "port_xmit_data", "port_rcv_data", "port_xmit_wait", "symbol_error", "link_downed", "link_error_recovery",
)  # fmt: skip
_CLOCK_UNSYNCHRONIZED = 0x0040  # STA_UNSYNC of adjtimex(2)
_CLOCK_IN_NANOSECONDS = 0x2000  # STA_NANO

Metrics = dict[str, float]


class HostMetrics:
    """Sample the metrics of the host. `folder`: a folder on the file system of the run."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        nvml = load_nvml()
        self._gpus = None if nvml is None else GpuMetrics(nvml)
        self._pause = PauseFrames()
        psutil.cpu_percent()  # the first call has nothing to compare with

    def sample(self) -> Metrics:
        """Return the metrics by name."""
        metrics = dict(_host_metrics())
        for name, path in (("shm", Path("/dev/shm")), ("run", self._folder)):
            with contextlib.suppress(OSError):
                if path is not None:
                    usage = psutil.disk_usage(str(path))
                    metrics |= {f"disk.{name}.free": float(usage.free), f"disk.{name}.size": float(usage.total)}
        if (pause := self._pause.count()) is not None:
            metrics["network.pause"] = float(pause)
        for port in sorted(INFINIBAND.glob("*/ports/*")):
            prefix = f"infiniband.{port.parts[-3]}.{port.name}"
            for counter in _IB_COUNTERS:
                with contextlib.suppress(OSError, ValueError):
                    value = float((port / "counters" / counter).read_text(encoding="ascii"))
                    metrics[f"{prefix}.{counter}"] = value
            with contextlib.suppress(OSError):
                metrics[f"{prefix}.active"] = float("ACTIVE" in (port / "state").read_text())
        return metrics | (dict(self._gpus.sample()) if self._gpus is not None else {})


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
    clock = _Timex()  # the kernel's account of the host's clock, which NTP or PTP keeps, in seconds
    if ctypes.CDLL(None).adjtimex(ctypes.byref(clock)) >= 0:
        yield "clock.offset_s", clock.offset * (1e-9 if clock.status & _CLOCK_IN_NANOSECONDS else 1e-6)
        yield "clock.error_s", clock.maxerror * 1e-6
        yield "clock.synchronized", float(not clock.status & _CLOCK_UNSYNCHRONIZED)


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
