"""Limits of the operating system on this node that no run can do with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from megascale.core.limits import memory_map_limit, open_file_limits, process_limits
from megascale.core.units import format_bytes
from megascale.operate.health.checks.result import CheckResult

MIN_OPEN_FILES = 1024
MIN_MEMORY_MAPS = 65_530
MIN_PROCESSES_PER_SLOT = 64
MIN_SHARED_MEMORY_PER_SLOT = 8 << 20
"""Bytes of /dev/shm for a rank's log and rings; copies of the state in memory need more."""


def check_limits(arguments: Mapping[str, Any]) -> CheckResult:
    """Compare the limits with the needs of `slots` ranks. The value is the number of limits that are too low."""
    found = list(_low_limits(int(arguments.get("slots", 1))))
    return CheckResult("limits", value=float(len(found)), problem="; ".join(found))


def _low_limits(slots: int) -> Iterator[str]:
    if (files := open_file_limits()[1]) < MIN_OPEN_FILES:
        yield f"{files} open files, {MIN_OPEN_FILES} are needed: `ulimit -n`"
    if (maps := memory_map_limit()) < MIN_MEMORY_MAPS:
        yield f"{maps} memory maps, {MIN_MEMORY_MAPS} are needed: `sysctl vm.max_map_count`"
    if os.geteuid() and (processes := process_limits()[1]) < (needed := MIN_PROCESSES_PER_SLOT * slots):
        yield f"{processes} processes, {needed} are needed: `ulimit -u`"
    status = os.statvfs("/dev/shm")
    if (free := status.f_bavail * status.f_frsize) < (shared := MIN_SHARED_MEMORY_PER_SLOT * slots):
        yield f"{format_bytes(free)} free in /dev/shm, {format_bytes(shared)} are needed: `docker run --shm-size`"
