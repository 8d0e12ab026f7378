"""Observations in the output of a rank: a table of patterns, each with the name of what it shows.

An observation says what was seen, never who is to blame: a rank that prints an NCCL error has most often lost a peer.
The names of common ones follow NVIDIA's Resiliency Extension.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

LAST_LINES = 20  # lines of a rank's output that are reported

MAX_LINE_CHARACTERS = 500

_TAIL_BYTES = 64 << 10  # bytes at the end of a log in which observations are looked for


def _xid(*numbers: int) -> str:
    """Return the pattern of errors by these numbers that NVIDIA's kernel driver logs."""
    return rf"\bXid \([^)]*\): (?:{'|'.join(map(str, numbers))})\b"


OBSERVATIONS: dict[str, tuple[str, ...]] = {
    "cuda_oom": (r"CUDA out of memory", r"torch\.(cuda\.)?OutOfMemoryError", r"CUDA_ERROR_OUT_OF_MEMORY",
        r"CUBLAS_STATUS_ALLOC_FAILED"),
    "host_oom": (r"\bMemoryError\b", r"std::bad_alloc", r"Cannot allocate memory",
        r"DefaultCPUAllocator: can't allocate memory"),
    "linux_oom_kill": (r"[Oo]ut of memory: Killed process", r"oom-kill:", r"oom_kill event",
        r"Memory cgroup out of memory"),
    "gpu_ecc": (r"uncorrectable ECC", r"double.bit ECC", r"CUDA_ERROR_ECC_UNCORRECTABLE", _xid(48, 63, 64, 94, 95)),
    "gpu_lost": (r"GPU has fallen off the bus", _xid(79), r"GPU is lost", r"CUDA_ERROR_DEVICE_UNAVAILABLE",
        r"no CUDA-capable device is detected"),
    "gpu_hardware_fault": (r"unspecified launch failure", r"CUDA_ERROR_LAUNCH_FAILED", r"[Hh]ardware stack error",
        r"CUDA_ERROR_HARDWARE_STACK_ERROR", r"NVLink.*(?:fatal|error)",
        _xid(61, 62, 69, 74, 109, 119, 120, 121, 140, 143, 158)),
    "gpu_illegal_access": (r"illegal memory access", r"CUDA_ERROR_ILLEGAL_ADDRESS", r"misaligned address",
        _xid(13, 31)),
    "cuda_assert": (r"device-side assert triggered", r"CUDA_KERNEL_ASSERT"),
    "cuda_error": (r"CUDA error:", r"CUDA_ERROR_", r"CUBLAS_STATUS_", r"CUDNN_STATUS_"),
    "nccl_watchdog": (r"Watchdog caught collective operation timeout", r"watchdog thread terminated",
        r"ProcessGroupNCCL'?s watchdog"),
    "nccl_network": (r"NCCL WARN NET/IB.*(?:error|failed)", r"ibv_poll_cq.*error", r"NET/IB : Got completion .* error",
        r"transport retry counter exceeded", r"vendor err 129"),
    "nccl_cascade": (r"NCCL communicator was aborted", r"ncclRemoteError",
        r"remote process exited or there was a network error", r"ncclInternalError", r"NCCL error"),
    "peer_lost": (r"[Cc]onnection (?:closed|reset) by peer", r"[Cc]onnection refused", r"[Bb]roken pipe",
        r"timed out waiting \d+ s for", r"\bLostPeerError\b"),
    "collective_timeout": (r"[Tt]imed out waiting \d+ms for (?:recv|send)", r"collective operation timeout",
        r"[Ww]ait timeout after"),
    "gloo_mismatch": (r"gloo::EnforceNotMet",),
    "disk_full": (r"No space left on device", r"\bENOSPC\b", r"Disk quota exceeded", r"unexpected pos \d+ vs \d+"),
    "io_error": (r"Input/output error", r"\bEIO\b", r"Stale file handle", r"Remote I/O error"),
    "storage_error": (r"Transport endpoint is not connected", r"Read-only file system", r"SlowDown",
        r"ServiceUnavailable", r"EndpointConnectionError", r"server .* not responding"),
    "disk_failure": (r"blk_update_request: .*error", r"Buffer I/O error", r"EXT4-fs error",
        r"XFS .*(?:corruption|I/O error)", r"nvme.*(?:reset|timeout|failed)"),
    "bus_error": (r"\bBus error\b", r"\bSIGBUS\b"),
    "segmentation_fault": (r"Segmentation fault", r"\bSIGSEGV\b"),
    "native_abort": (r"terminate called", r"Fatal Python error: Aborted", r"double free or corruption",
        r"malloc\(\): "),
    "not_finite": (r"\bDivergenceError\b", r"is not finite"),
    "too_many_files": (r"Too many open files",),
    "no_thread": (r"can't start new thread", r"Resource temporarily unavailable"),
    "import_failed": (r"\bModuleNotFoundError\b", r"\bImportError\b", r"cannot open shared object file"),
}  # fmt: skip
"""Names of observations, for policies, with the patterns of lines that show each. Several may hold for one line."""

_ERROR = re.compile(r"^(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning))(?::|$)")
"""The last line of a traceback: the class of the error, and its message."""


def observe(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the observations in lines of output, in the order of the table; the class of the last error
    of Python is added as `python:CLASS`.
    """
    text = list(lines)
    found = [name for name, patterns in OBSERVATIONS.items() if any(map(re.compile("|".join(patterns)).search, text))]
    errors = [match[1] for line in text if (match := _ERROR.match(line))]
    return tuple(found + [f"python:{error}" for error in errors[-1:]])


def read_tail(log: Path) -> list[str]:
    """Return the lines at the end of a log, each cut to MAX_LINE_CHARACTERS; none if it cannot be read."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    return [line[:MAX_LINE_CHARACTERS] for line in text.splitlines()]


class OomKills:
    """Counts processes that the kernel has killed for their memory in the control group of a process, or on the host
    if the group has no count. A rise explains a SIGKILL that nobody sent.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._pid, self._proc, self._cgroups = pid, proc, cgroups
        self._groups = ""
        self._file: Path | None = None
        self.follow()

    def follow(self) -> None:
        """Count anew if the process was moved to another group. The count of its last group outlives the process."""
        try:
            groups = (self._proc / str(self._pid) / "cgroup").read_text(encoding="utf-8")
        except OSError:
            groups = ""
        if groups == self._groups and self._file is not None:
            return
        if groups or self._file is None:
            files = _oom_files(groups, self._proc, self._cgroups)
            self._groups = groups
            self._file = next((path for path in files if _oom_count(path) is not None), None)
            self._before = self.count

    @property
    def count(self) -> int:
        """The processes killed so far."""
        return (_oom_count(self._file) or 0) if self._file is not None else 0

    def have_risen(self) -> bool:
        """Return True if the kernel has killed a process since the process was first seen in its group."""
        return self.count > self._before


def _oom_count(path: Path) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _oom_files(groups: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """Files with a line "oom_kill COUNT": of the control group (version 2, then 1), then of the host."""
    for line in groups.splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield cgroups / group.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield cgroups / "memory" / group.lstrip("/") / "memory.oom_control"
            yield cgroups / "memory" / "memory.oom_control"  # in a container the path is the host's
    yield proc / "vmstat"
