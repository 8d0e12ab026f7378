"""Limits of the operating system on this process: open files, memory maps, processes. Hints for errors at a limit."""

from __future__ import annotations

import errno
import os
import resource
import sys
from pathlib import Path

MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")

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


def raise_soft_limits(open_files: int) -> None:
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


def _limits(kind: int) -> tuple[int, int]:
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(kind))
    return soft, hard
