"""Memory: bandwidth of copies in the host's memory, and every byte of the last copy compared with its source."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from typing import Any

from megascale.operate.health.checks.result import CheckResult

MEMORY_BYTES = 64 << 20
"""Bytes of a copy: more than a processor's caches."""

COPIES = 9


def check_memory(arguments: Mapping[str, Any]) -> CheckResult:
    """Copy `bytes` of memory (default: MEMORY_BYTES); the value is the median of the copies."""
    size = int(arguments.get("bytes", MEMORY_BYTES))
    block = random.Random(0).randbytes(min(size, 1 << 20))
    source = bytearray(block * (size // len(block)))
    target = bytearray(len(source))
    seconds = []
    for _ in range(COPIES):
        start = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - start)
    problem = "" if target == source else "a copy of memory differs from its source"
    rates = [2 * len(source) / passed for passed in seconds]  # read and written
    return CheckResult("memory", value=statistics.median(rates), problem=problem, details={"best": max(rates)})
