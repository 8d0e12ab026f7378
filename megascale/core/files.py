"""Files that are whole or not there: written under a temporary name, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def atomic(path: Path, mode: str = "wb") -> Iterator[IO]:
    """Open a file that appears under `path`, complete and on disk, when the block ends; on an error nothing is left."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    encoding = None if "b" in mode else "utf-8"
    try:
        with open(temporary, mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path, "w") as file:
        file.write(text)


def sync_folder(path: Path) -> None:
    """Flush a folder, so that a rename in it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def readable(path: str | Path) -> bool:
    """Whether there is a file that can be read. A name that is too long, or in a closed folder, is no file."""
    try:
        return Path(path).is_file() and os.access(path, os.R_OK)
    except (OSError, ValueError):
        return False


def fingerprint(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
