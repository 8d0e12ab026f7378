"""Files by path or URL, for reading. The client of remote storage is imported only for a URL."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FileFacts:
    """Bytes of a file, and a version that differs after a change."""

    size: int
    version: str


def is_url(name: str) -> bool:
    """Return True for a URL of an fsspec file system, False for a path."""
    return "://" in name


def file_facts(name: str) -> FileFacts:
    """The size and version of a file. Raises: OSError"""
    if is_url(name):
        from megascale.core.storage import Location

        return Location(name).facts()
    return _local_facts(name, Path(name).stat())


@contextmanager
def open_readable(name: str) -> Iterator[tuple[Any, FileFacts]]:
    """Open a file, with `seek` and `read`. Raises: OSError"""
    if is_url(name):
        from megascale.core.storage import Location, RangedFile

        remote = RangedFile(Location(name))
        yield remote, FileFacts(remote.size, remote.version)
        return
    with open(name, "rb") as file:
        yield file, _local_facts(name, os.fstat(file.fileno()))


def read_file(name: str) -> bytes:
    """Read a file. Raises: OSError"""
    if is_url(name):
        from megascale.core.storage import Location

        return Location(name).read()
    return Path(name).read_bytes()


def _local_facts(name: str, facts: os.stat_result) -> FileFacts:
    if not stat.S_ISREG(facts.st_mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return FileFacts(facts.st_size, str(facts.st_mtime_ns))
