"""CPU affinity: a rank runs on the cores of its GPU's NUMA node, where copies and kernel launches are fastest."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from megascale.core.env_numbers import openmp_threads
from megascale.core.errors import ConfigError, Problem

CPU_BIND_ENV = "MEGASCALE_CPU_BIND"  # environment variable: `none` leaves every rank on its launcher's cores

_DEVICES = Path("/sys/bus/pci/devices")
_TASKS = Path("/proc/self/task")


def bind_to_local_cores(
    pci_address: str | None, env: Mapping[str, str] = os.environ, devices: Path = _DEVICES
) -> set[int]:
    """Bind this process and its threads to the allowed cores near a device, and return the cores; empty if not bound.

    `pci_address`: as in /sys/bus/pci/devices; None for no device. Nothing is bound if the host does not report the near
    cores or has a single NUMA node, or if fewer near cores are allowed than the process has threads (OMP_NUM_THREADS).
    """
    if (binding := env.get(CPU_BIND_ENV, "")) not in ("", "none"):
        raise ConfigError([Problem("environment", CPU_BIND_ENV, f"{binding!r} is not 'none'", "'none', or unset it")])
    if pci_address is None or binding:
        return set()
    try:
        node = int((devices / pci_address / "numa_node").read_text())
        local = parse_cpu_list((devices / pci_address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()
    allowed = os.sched_getaffinity(0)
    chosen = local & allowed
    if node < 0 or chosen == allowed or len(chosen) < (openmp_threads(env) or 1):
        return set()
    for task in _TASKS.iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended
            os.sched_setaffinity(int(task.name), chosen)
    return chosen


def parse_cpu_list(text: str) -> set[int]:
    """Parse a list of cores in the kernel's notation, such as 0-3,8.

    Raises: ValueError
    """
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
