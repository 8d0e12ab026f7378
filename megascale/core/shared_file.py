"""Files in shared memory that a rank maps and other processes read."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path


def map_new_file(path: Path, size: int) -> mmap.mmap:
    """Map a new file of zero bytes, which only this user reads. Raises: OSError, also if shared memory is full"""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)  # writing beyond a full file system would be a SIGBUS
        return mmap.mmap(descriptor, size)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def open_for_reading(path: Path) -> int:
    """Open a regular file, not a link, and return its descriptor. Raises: OSError"""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(f"{path}: not a regular file")
