"""Atomic files and folders: written under a temporary name, flushed to disk, then renamed. Also file locks, and what is
at a path: `exists`, `is_file`, `is_folder`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import glob
import hashlib
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from megascale.core.errors import Exit, MegascaleError
from megascale.core.limits import os_error_hint
from megascale.core.wait_notice import WaitNotice

SHARED_MEMORY = Path("/dev/shm")

LEFTOVER_S = 3600.0  # seconds without a write after which a temporary file is taken for one of a killed process

UMASK = os.umask(0o077)  # reading the umask requires setting it
os.umask(UMASK)


def temporary_path(path: Path) -> Path:
    """Return a new name beside `path`, to write it under: processes of several hosts may have the same id."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def remove_leftovers(path: Path) -> None:
    """Remove temporary files of `path` that killed processes have left: those that nothing was written to for long."""
    for found in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):  # removed by another process, or another user's
            if time.time() - found.stat().st_mtime > LEFTOVER_S:
                found.unlink()


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "wb") -> Iterator[IO]:
    """Open a temporary file; move it to `path`, flushed to disk, when the block succeeds, and delete it on an error. A
    symbolic link stays, and its target is replaced.

    Raises: OSError, also if `path` is not a regular file, such as a device.
    """
    path = path.resolve()
    if exists(path) and not is_file(path):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    temporary = temporary_path(path)
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
    """Create a temporary folder; move it to `path` when the block succeeds, and delete it on an error.

    Raises: OSError, also if `path` exists.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        temporary.mkdir()
        yield temporary
        for folder, _, files in os.walk(temporary, topdown=False):
            for file in files:
                sync_file(Path(folder) / file)
            sync_folder(Path(folder))
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_file(path, "w") as file:
        file.write(text)


def sync_file(path: Path) -> None:
    """Flush a file to disk, and set its mode according to the umask: some libraries create files as 0600."""
    with open(path, "rb") as file:
        os.fchmod(file.fileno(), 0o666 & ~UMASK)
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder to disk, because a rename must survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def foreign_owner(folder: Path) -> int | None:
    """The user who owns a folder, or a link to it, and is neither this process's user nor root; None without one. What
    this process writes may belong to another user by its file system, as with root on NFS.

    Raises: OSError
    """
    owners = {folder.lstat().st_uid, folder.stat().st_uid} - {os.geteuid(), 0}
    if not owners:
        return None
    with tempfile.TemporaryFile(dir=folder) as file:
        owners.discard(os.fstat(file.fileno()).st_uid)
    return max(owners, default=None)


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # error numbers of file systems without locks
LOCK_FILE = ".lock"  # lock file of a folder. Its one line names the holder


def lock_folder(folder: Path, owner: str) -> IO[str]:
    """Create a folder and lock it until the returned file is closed or this process ends. File systems without locks
    grant every request. `owner`: the line in the lock file, for other processes' messages.

    Raises: BlockingIOError with the holder's line if another process has the lock; OSError for a read-only folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115  the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.readline().strip()
        file.close()
        raise BlockingIOError(error.errno, holder or "another process") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    with contextlib.suppress(OSError):  # the disk may be full; the lock is held without the line
        os.truncate(file.fileno(), 0)
        os.write(file.fileno(), f"{owner}\n".encode())
    return file


def build_once(path: Path, build: Callable[[], None]) -> None:
    """Return when `path` exists, created by `build` in one of the processes that wait for it here. Processes on a file
    system without locks may all build, the same content: whose `build` fails may use that of another.

    Raises: OSError, and what `build` raises; another process then builds.
    """
    notice = WaitNotice(f"process {os.getpid()}")
    while not exists(path):
        if lock := lock_to_build(path):
            with lock:
                try:
                    if not exists(path):
                        build()
                except OSError:
                    if not exists(path):
                        raise
                Path(lock.name).unlink(missing_ok=True)
            return
        notice.print_if_due(lambda: f"{path}, which another process builds")
        time.sleep(min(0.01 + notice.waited_s / 8, 1.0))


def lock_to_build(path: Path) -> IO[bytes] | None:
    """Lock the building of `path`, in its folder, until the returned file is closed here and in child processes that
    have it; None if another process has the lock. Who has built removes the lock's file.

    Raises: OSError
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path.with_name(f".{path.name}.lock"), "ab")  # noqa: SIM115  the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            file.close()
        if isinstance(error, BlockingIOError):
            return None
        if error.errno not in NO_LOCKS:
            raise
    return file


def absolute_path(path: str | Path) -> Path:
    """Make a path absolute and expand `~`; `~name` of an unknown user stays as it is."""
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111 - Path's raises RuntimeError


class PathError(MegascaleError, OSError):
    """A file system does not say what is at a path: a folder of another user, an overlong name, a lost network file.

    Also an OSError with number and path, for callers that explain those of a whole operation.
    """

    def __init__(self, path: str | Path, error: OSError) -> None:
        reason = error.strerror or str(error)
        super().__init__(f"{path} cannot be looked up: {reason}", hint=os_error_hint(error, "give another path"))
        self.errno, self.strerror, self.filename = error.errno, reason, str(path)
        if error.errno in USERS_MISTAKES:
            self.exit_status = Exit.CONFIG


USERS_MISTAKES = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
"""Error numbers of a path that a restart finds as it is."""


def exists(path: str | Path, *, optional: bool = False) -> bool:
    """Return True if a file or a folder is there. pathlib raises any error here, and says False from Python 3.14 on.

    Raises: PathError if the file system does not say; an `optional` file is absent then, with one warning
    """
    return _mode(path, optional) != 0


def is_file(path: str | Path, *, optional: bool = False) -> bool:
    """Return True for a regular file. Raises: as `exists`"""
    return stat.S_ISREG(_mode(path, optional))


def is_folder(path: str | Path, *, optional: bool = False) -> bool:
    """Return True for a folder. Raises: as `exists`"""
    return stat.S_ISDIR(_mode(path, optional))


def _mode(path: str | Path, optional: bool) -> int:
    try:
        return Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null byte, which no name has
        return 0
    except OSError as error:
        if not optional:
            raise PathError(path, error) from None
        _warn_once(f"{path} cannot be looked up: {error.strerror}; this process goes on without it")
        return 0


@functools.cache
def _warn_once(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr)


LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Begin of the text that stands for a file in a git repository until git-lfs fetches it."""

NO_FILE = "there is no file "  # begin of the reason for a file that is absent


def why_unreadable(path: str | Path) -> str:
    """Say why a regular file cannot be read, or that git-lfs has not fetched it; "" if it can."""
    try:
        if not is_file(path):
            return f"{path} is not a regular file" if exists(path) else f"{NO_FILE}{path}"
        return pointer_notice(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"


def pointer_notice(path: str | Path) -> str:
    """Say that a file is a git-lfs pointer; "" for another one. Raises: OSError"""
    with open(path, "rb") as file:
        is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    return f"{path} is a git-lfs pointer, not the file itself: `git lfs pull` fetches it" if is_pointer else ""


def fingerprint(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
