"""Metrics of this host's NVIDIA GPUs, by NVIDIA's management library (NVML), and the driver's critical errors (Xid)."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator


class GpuMetrics:
    """Samples the GPUs. `nvml`: the library, as `load_nvml` returns it."""

    def __init__(self, nvml: types.ModuleType) -> None:
        self._nvml = nvml
        self._count = 0
        self._xids: dict[int, list[int]] = {}
        self._events = None
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            events = nvml.nvmlEventSetCreate()
            for index in range(nvml.nvmlDeviceGetCount()):
                with contextlib.suppress(nvml.NVMLError):
                    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
                    nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, events)
                    self._xids[index] = []
            self._events = events

    def sample(self) -> Iterator[tuple[str, float]]:
        """Yield metrics by name; those that a GPU does not have are absent."""
        nvml = self._nvml
        reads = {
            "percent": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "memory.used": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
            "temperature": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "clock_mhz": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "throttle": nvml.nvmlDeviceGetCurrentClocksThrottleReasons,
            "pcie_width": nvml.nvmlDeviceGetCurrPcieLinkWidth,
            "ecc_uncorrected": lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        }
        with contextlib.suppress(nvml.NVMLError):  # among them: no further error now
            while self._events is not None:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                self._xids.setdefault(nvml.nvmlDeviceGetIndex(event.device), []).append(int(event.eventData))
        with contextlib.suppress(nvml.NVMLError):  # a GPU that is lost may take all with it: those of before are lost
            self._count = nvml.nvmlDeviceGetCount()
        for index in range(self._count):
            if index in self._xids:
                yield f"gpu{index}.xid", float(len(self._xids[index]))
                yield from ((f"gpu{index}.last_xid", float(xid)) for xid in self._xids[index][-1:])
            found = {}
            with contextlib.suppress(nvml.NVMLError):
                gpu = nvml.nvmlDeviceGetHandleByIndex(index)
                for name, read in reads.items():
                    with contextlib.suppress(nvml.NVMLError):
                        found[f"gpu{index}.{name}"] = float(read(gpu))
            yield from found.items() if found else [(f"gpu{index}.lost", 1.0)]


def load_nvml() -> types.ModuleType | None:
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
