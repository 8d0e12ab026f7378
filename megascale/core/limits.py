"""Limits of the operating system on this process: open files, memory maps, processes, and the processor time and memory
of its control groups. Hints for errors at a limit.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
PROCESS = Path("/proc/self")

PROCESSES_HINT = "`ulimit -u` raises the limit of this user's processes and threads; a container may have a lower one"
PERMISSIONS_HINT = "check the permissions of the file and of its folder"
HINTS = {
    errno.EMFILE: "`ulimit -n` raises this process's limit of open files",
    errno.ENFILE: "this host has as many open files as fs.file-max of sysctl allows: close some, or raise it",
    errno.ENOMEM: "free some memory, or raise vm.max_map_count of sysctl if this process has that many memory maps",
    errno.EAGAIN: PROCESSES_HINT,
    errno.EFBIG: "`ulimit -f` raises this process's limit of the size of files and of shared memory",
    errno.ENOSPC: "free some space or inodes there",
    errno.EDQUOT: "this user's or project's disk quota there is used up: free some space",
    errno.EROFS: "the file system is mounted read-only: give another folder",
    errno.EACCES: PERMISSIONS_HINT,
    errno.EPERM: PERMISSIONS_HINT,
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EIO: "the device or the network file system has failed: see the kernel's log",
    errno.ENOPKG: "install that package on every host, or give a path",
    errno.EPROTONOSUPPORT: "a URL of a file system that fsspec knows, such as s3://BUCKET/NAME",
    errno.ENOKEY: "give this process credentials of the storage, such as AWS_ACCESS_KEY_ID or AWS_PROFILE",
    errno.ESTALE: "the network file system has lost the file: mount it again",
}
"""Hint for an error number, whatever the operation."""


_NO_THREAD = ("can't start new thread", os.strerror(errno.EAGAIN))


def os_error_hint(error: OSError, otherwise: str) -> str:
    """Return the hint for the number of `error`; `otherwise`, the operation's own hint, for a number without one."""
    return HINTS.get(error.errno or 0, otherwise)


def with_os_error_hint(error: OSError, hint: str) -> str:
    """Return the hint for the number of `error`, if there is one, and the operation's own `hint` as the other way."""
    return f"{found}, or {hint}" if (found := HINTS.get(error.errno or 0)) else hint


def lacks_threads(error: BaseException) -> bool:
    """Return True if an error says that no thread could be started: Python and C++ have no type of their own for it."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_THREAD)


def open_file_limits() -> tuple[int, int]:
    """The soft and the hard limit of open files of this process."""
    return _limits(resource.RLIMIT_NOFILE)


def process_limits() -> tuple[int, int]:
    """The soft and the hard limit of processes and threads of this user. The kernel does not apply them to root."""
    return _limits(resource.RLIMIT_NPROC)


def raise_soft_limits(open_files: int = sys.maxsize) -> None:
    """Raise the soft limit of open files to `open_files`, and of processes to the hard limit, as far as hard limits
    allow. Child processes inherit the limits.
    """
    for kind, wanted in ((resource.RLIMIT_NOFILE, open_files), (resource.RLIMIT_NPROC, sys.maxsize)):
        soft, hard = _limits(kind)
        if soft < min(wanted, hard):
            unlimited = min(wanted, hard) == sys.maxsize
            _, raw_hard = resource.getrlimit(kind)
            resource.setrlimit(kind, (resource.RLIM_INFINITY if unlimited else min(wanted, hard), raw_hard))


def memory_map_limit() -> int:
    """Number of memory maps that a process may have; unlimited where the kernel has no such limit."""
    try:
        return int(MAX_MAP_COUNT.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return sys.maxsize


def cpu_quota() -> float:
    """Cores whose time this process may use, by the control groups that it is in; infinite without a quota."""
    found = [sys.float_info.max]
    for folder in _control_groups("cpu"):
        words = (
            _read(folder / "cpu.max") or f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        )
        quota, _, period = words.partition(" ")
        if quota.isdigit() and period.isdigit():  # "max", or -1: none
            found.append(int(quota) / int(period))
    return min(found)


def memory_limits() -> tuple[int, int]:
    """Bytes that the control groups of this process may use, and those of them that are free, with the pages of files
    that the kernel can drop; `sys.maxsize` without a limit.
    """
    found = [(sys.maxsize, sys.maxsize)]
    for folder in _control_groups("memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        pages = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
        if limit.isdigit() and used.isdigit():
            droppable = int(pages.get("total_inactive_file", pages.get("inactive_file", 0)))
            found.append((int(limit), max(0, int(limit) - int(used) + droppable)))
    return min(total for total, _ in found), min(free for _, free in found)


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group with a controller, and of those above it: each has limits. Of
    version 2, where one hierarchy has all controllers, or of version 1. See cgroups(7).
    """
    rows = (line.split(":", 2) for line in _read(PROCESS / "cgroup").splitlines())
    groups = {name: PurePosixPath(path) for _, names, path in rows for name in names.split(",")}
    for line in _read(PROCESS / "mountinfo").splitlines():
        place, _, kind = line.partition(" - ")
        system, _, options = kind.split(" ", 2)
        name = "" if system == "cgroup2" else controller
        if name not in groups or (system != "cgroup2" and not (system == "cgroup" and name in options.split(","))):
            continue
        root, mount = place.split()[3:5]
        group = groups[name]  # of another name space in a container without one of its own: then the mount is all
        inside = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
        folder = Path(mount, inside if ".." not in inside.parts else "")
        yield from (folder, *(above for above in folder.parents if above.is_relative_to(mount)))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _limits(kind: int) -> tuple[int, int]:
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(kind))
    return soft, hard
