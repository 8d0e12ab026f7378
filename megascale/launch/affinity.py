"""Keeping a rank on the cores near its GPU: from others its memory copies and kernel launches take longer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

BIND = "MEGASCALE_CPU_BIND"
"""Environment variable: `none` leaves every rank on the cores where the launcher put it."""

_DEVICES = Path("/sys/bus/pci/devices")
_TASKS = Path("/proc/self/task")


def bind(address: str | None, env: Mapping[str, str] = os.environ, devices: Path = _DEVICES) -> set[int]:
    """Bind this process and its threads to those of its cores that are near a device; returns them, none if it stays.

    `address`: as in /sys/bus/pci/devices; None for no device. It stays where it is if the host does not tell which
    cores are near or has one NUMA node, or if the process may use none of them, or fewer than it has threads
    (OMP_NUM_THREADS).
    """
    if address is None or env.get(BIND, "") == "none":
        return set()
    try:
        node = int((devices / address / "numa_node").read_text())
        near = cores((devices / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()
    allowed = os.sched_getaffinity(0)
    chosen = near & allowed
    threads = env.get("OMP_NUM_THREADS", "")
    if node < 0 or chosen == allowed or len(chosen) < max(1, int(threads) if threads.isdecimal() else 1):
        return set()
    for task in _TASKS.iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended
            os.sched_setaffinity(int(task.name), chosen)
    return chosen


def cores(text: str) -> set[int]:
    """The numbers in the kernel's notation, such as 0-3,8.

    Raises: ValueError
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
