"""Checksums of cache files: the last bytes of a file are the CRC-32 of all others, u32, little-endian. They find
damage, not a forger.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from megascale.core.files import atomic_file, build_once

CHECKSUM_BYTES = 4

PART_BYTES = 8 << 20  # bytes that are read at once to check a file


def with_checksum(data: bytes) -> bytes:
    """Return `data` and its checksum."""
    return data + _encoded(zlib.crc32(data))


def is_intact(data: bytes) -> bool:
    """Return True if the last bytes of `data` are the checksum of the others."""
    content = memoryview(data)[:-CHECKSUM_BYTES]
    return data[-CHECKSUM_BYTES:] == _encoded(zlib.crc32(content))


@contextlib.contextmanager
def file_with_checksum(path: Path) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Write a file atomically by the returned function; the checksum follows at the end. Raises: OSError"""
    checksum = 0
    with atomic_file(path) as file:

        def write(data: bytes | memoryview) -> None:
            nonlocal checksum
            checksum = zlib.crc32(data, checksum)
            file.write(data)

        yield write
        file.write(_encoded(checksum))


def check_file(path: Path, size: int) -> None:
    """Compare a file of `size` bytes, without the checksum, with its checksum. All of it is read.

    Raises: ValueError; OSError
    """
    checksum, left = 0, size
    with open(path, "rb") as file:
        found = os.fstat(file.fileno()).st_size - CHECKSUM_BYTES
        if found != size:
            raise ValueError(f"has {found} bytes, not {size}")
        while part := file.read(min(left, PART_BYTES)):
            checksum = zlib.crc32(part, checksum)
            left -= len(part)
        if file.read() != _encoded(checksum):
            raise ValueError("has a content that its checksum does not fit")


def once_a_version(path: Path, check: Callable[[], None]) -> None:
    """Call `check` of a file in one of the processes with access to its folder, and again after a change of inode or
    times. An empty file in the folder is the sign of a check; if it cannot be written, every process checks.

    Raises: OSError, and what `check` raises
    """
    facts = path.stat()
    version = f"{facts.st_ino:x}-{facts.st_mtime_ns:x}-{facts.st_ctime_ns:x}"
    marker = path.with_name(f".{path.name}.{version}.checked")

    def check_and_mark() -> None:
        check()
        with contextlib.suppress(OSError):
            marker.touch()

    try:
        build_once(marker, check_and_mark)
    except OSError:  # no lock can be written there
        check()


def _encoded(checksum: int) -> bytes:
    return checksum.to_bytes(CHECKSUM_BYTES, "little")
