"""Files that are whole or not there: written under a temporary name, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

UMASK = os.umask(0o077)  # there is no way to ask that does not set it
os.umask(UMASK)


@contextlib.contextmanager
def atomic(path: Path, mode: str = "wb") -> Iterator[IO]:
    """Open a file that appears under `path`, complete and on disk, when the block ends; on an error nothing is left. A
    link stays, and what it leads to is replaced.

    Raises: OSError, also if something is there that is no file, such as a device
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
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


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which appears under `path` when the block ends; on an error nothing is left.

    Raises: OSError, also if something is there
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            settle(file)
        sync_folder(temporary)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path, "w") as file:
        file.write(text)


def settle(path: Path) -> None:
    """Flush a file to the disk, and let those read it who may read what others write: some libraries keep files to
    their owner.
    """
    with open(path, "rb") as file:
        os.fchmod(file.fileno(), 0o666 & ~UMASK)
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder, so that a rename in it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


LOCK = ".lock"
"""File of a claimed folder, with a line on who claims it."""


def claim(folder: Path, who: str) -> IO[str]:
    """Make a folder and hold it until the returned file is closed, or this process ends, whatever it ends of. On a file
    system without locks nothing is held.

    Raises: BlockingIOError, with the holder's own line, if another process holds it; OSError if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115  the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.readline().strip()
        file.close()
        raise BlockingIOError(error.errno, holder or "another process") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    with contextlib.suppress(OSError):  # of a disk that is full; it is held all the same
        os.truncate(file.fileno(), 0)
        os.write(file.fileno(), f"{who}\n".encode())
    return file


def expanded(path: str | Path) -> Path:
    """The whole path, with a home folder for a `~`; where there is no such user it is a name as any other."""
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111 - Path's raises RuntimeError


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
