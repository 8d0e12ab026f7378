"""Disk: write, fsync, drop from the page cache, read back and compare the digest."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from megascale.operate.health.checks.result import CheckResult

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
