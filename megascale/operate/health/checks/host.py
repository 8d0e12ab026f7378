"""Checks of a host alone, without torch: limits of the operating system, memory, disk, and TCP on loopback."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from megascale.core.limits import memory_map_limit, open_file_limits, process_limits
from megascale.core.network import LOOPBACK, listen
from megascale.core.units import format_bytes
from megascale.operate.health.checks.result import CheckResult
from megascale.operate.health.checks.transfer import receive_for, send_until_answer

MIN_OPEN_FILES = 1024
MIN_MEMORY_MAPS = 65_530
MIN_PROCESSES_PER_SLOT = 64
MIN_SHARED_MEMORY_PER_SLOT = 8 << 20
"""Bytes of /dev/shm for a rank's log and rings; copies of the state in memory need more."""


def check_limits(arguments: Mapping[str, Any]) -> CheckResult:
    """Compare the limits with the needs of `slots` ranks. The value is the number of limits that are too low."""
    slots, found = int(arguments.get("slots", 1)), list[str]()
    if (files := open_file_limits()[1]) < MIN_OPEN_FILES:
        found.append(f"{files} open files, {MIN_OPEN_FILES} are needed: `ulimit -n`")
    if (maps := memory_map_limit()) < MIN_MEMORY_MAPS:
        found.append(f"{maps} memory maps, {MIN_MEMORY_MAPS} are needed: `sysctl vm.max_map_count`")
    if os.geteuid() and (processes := process_limits()[1]) < (needed := MIN_PROCESSES_PER_SLOT * slots):
        found.append(f"{processes} processes, {needed} are needed: `ulimit -u`")
    status = os.statvfs("/dev/shm")
    if (free := status.f_bavail * status.f_frsize) < (shared := MIN_SHARED_MEMORY_PER_SLOT * slots):
        space = f"{format_bytes(free)} free in /dev/shm, {format_bytes(shared)} are needed"
        found.append(f"{space}: `docker run --shm-size`")
    return CheckResult("limits", value=float(len(found)), problem="; ".join(found))


MEMORY_BYTES = 64 << 20  # bytes of a copy: more than a processor's caches

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


DISK_BYTES = 32 << 20
_BLOCK = 1 << 20


def check_disk(arguments: Mapping[str, Any]) -> CheckResult:
    """Write and read `disk_bytes` (default: DISK_BYTES) in `folder` (default: the folder of temporary files).

    The value is the rate of writing with fsync. The rate of reading is a detail: a file system may keep the file in
    memory whatever it is told.
    """
    folder = arguments.get("folder") or tempfile.gettempdir()
    blocks = max(1, int(arguments.get("disk_bytes", DISK_BYTES)) // _BLOCK)
    block = random.Random(0).randbytes(_BLOCK)
    written = hashlib.sha256()
    for _ in range(blocks):
        written.update(block)
    with tempfile.TemporaryFile(dir=folder, prefix=".megascale-check-") as file:
        start = time.perf_counter()
        for _ in range(blocks):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        write_s = time.perf_counter() - start
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        read = b"".join(iter(lambda: file.read(_BLOCK), b""))
        read_s = time.perf_counter() - start
    problem = "" if hashlib.sha256(read).digest() == written.digest() else f"{folder}: a file reads back differently"
    rate = blocks * _BLOCK / write_s
    return CheckResult("disk", value=rate, problem=problem, details={"read": len(read) / read_s, "folder": str(folder)})


LOOPBACK_S = 0.4


def check_loopback(arguments: Mapping[str, Any]) -> CheckResult:
    """Transfer for `seconds` (default: LOOPBACK_S) over the loopback interface."""
    with listen(LOOPBACK) as listener, socket.create_connection(listener.getsockname()) as sender:
        receiver, _ = listener.accept()
        thread = threading.Thread(target=send_until_answer, args=(sender,))
        thread.start()
        try:
            with receiver:
                rate = receive_for(receiver, float(arguments.get("seconds", LOOPBACK_S)))
        finally:
            thread.join()
    return CheckResult("loopback", value=rate)
