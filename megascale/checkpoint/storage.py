"""Files and folders in any file system that fsspec knows: local, HDFS, object stores. What fails for a while is tried
again.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from megascale.core.files import atomic, expanded, settle

WRITABLE = "check that it is mounted, space, permissions"
"""What to do where something cannot be written."""

T = TypeVar("T")

BLOCK = 32 << 20
"""Bytes that are sent to an object store at once."""

PAUSES = 0.25, 10.0
"""Seconds until something is tried again: first, doubled each time, and at most."""

LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG}
"""Errors that trying again does not mend, beside those that have a class."""

CLASSES = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, FileExistsError: errno.EEXIST}
"""Numbers of errors that are raised without one."""


@dataclass(frozen=True)
class Location:
    """A file or a folder: `url` is a local path, or begins with fsspec's name of a file system and `://`. What fails is
    tried again for `patience` seconds, unless it would fail always.

    Every method raises OSError, with `filename`.
    """

    url: str
    patience: float = 60.0

    def __truediv__(self, name: str) -> Location:
        return Location(f"{self.url.rstrip('/')}/{name}", self.patience)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def local(self) -> Path | None:
        """The path, if it is one of this host's file systems."""
        path = self.url.removeprefix("file://").removeprefix("local://")
        return None if "://" in path else Path(path)

    def exists(self) -> bool:
        """Whether there is something."""
        return bool(self._tried(_info))

    def is_folder(self) -> bool:
        """Whether it is a folder; in an object store, whether something is in it."""
        return self._tried(_info).get("type") == "directory"

    def names(self) -> list[str]:
        """What is in this folder, in order; nothing if there is none."""

        def look(fs: Any, path: str) -> list[str]:
            fs.invalidate_cache()
            try:
                return sorted(Location(found).name for found in fs.ls(path, detail=False))
            except (FileNotFoundError, NotADirectoryError):
                return []

        return self._tried(look)

    def size(self) -> int:
        """Bytes of a file, or of all that is in a folder."""
        return self._tried(lambda fs, path: fs.du(path))

    def make(self) -> None:
        """Make a folder, and those above it, but for an object store's bucket. It must not be there yet."""

        def make(fs: Any, path: str) -> None:
            bucket = path.partition("/")[0]
            if bucket and ":" not in bucket and not _info(fs, bucket):  # not the name of an access point
                raise FileNotFoundError(errno.ENOENT, f"there is no {bucket}")
            fs.makedirs(path, exist_ok=False)

        self._tried(make)

    def probe(self) -> None:
        """See whether a folder can be written, which is made if it is not there."""
        if not self.exists():
            self.make()
        file = self / f".probe-{os.getpid()}"
        file.write(b"1")
        file.remove()

    def read(self) -> bytes:
        """A whole file."""
        return self._tried(lambda fs, path: fs.cat_file(path))

    def read_into(self, room: memoryview, start: int) -> int:
        """Fill `room` [bytes] from a place in a file. Returns how many bytes there were, fewer where it ends."""

        def fill(fs: Any, path: str) -> int:
            if not room:  # no range of an object store is empty
                return 0
            if self.local is None:
                data = fs.cat_file(path, start=start, end=start + len(room))
                room[: len(data)] = data
                return len(data)
            done = 0
            with open(path, "rb", buffering=0) as file:
                file.seek(start)
                while count := file.readinto(room[done:]):
                    done += count
            return done

        return self._tried(fill)

    def write(self, data: bytes) -> None:
        """Write a file that is there whole or not at all."""

        def put(fs: Any, path: str) -> None:
            if self.local is not None:
                with atomic(self.local) as file:
                    file.write(data)
                return
            fs.pipe_file(f"{path}.tmp", data)
            fs.mv(f"{path}.tmp", path)

        self._tried(put)

    def write_parts(self, parts: Callable[[], Iterable[bytes | memoryview]]) -> None:
        """Write a file of parts, on storage when this returns; `parts` begins anew when it is tried again. On an error
        a piece of it may stay.
        """

        def put(fs: Any, path: str) -> None:
            with fs.open(path, "wb", block_size=BLOCK) as file:
                for part in parts():
                    file.write(part)
            if self.local is not None:
                settle(self.local)

        self._tried(put)

    def remove(self) -> None:
        """Delete a file, or a folder with all that is in it; of a link only the link. Nothing there is no error."""

        def delete(fs: Any, path: str) -> None:
            if self.local is not None and self.local.is_symlink():
                self.local.unlink()
            elif _info(fs, path):
                fs.rm(path, recursive=True)
                if self.local is None and _info(fs, path):  # object stores delete many at once, and say nothing
                    raise OSError(errno.EBUSY, "it is still there")

        self._tried(delete)

    def gone(self, error: OSError) -> bool:
        """Whether an error in reading a file says that it is not what was written, rather than that storage, or who may
        read it, is to be looked after.
        """
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            return True
        return error.errno == errno.EINVAL or (self.local is not None and error.errno == errno.EIO)

    def _opened(self) -> tuple[Any, str]:
        """The file system, and the path in it. In a URL `::` stands between file systems, in a local path it may be."""
        if self.local is None:
            fs, path = url_to_fs(self.url)
            return fs, path
        return LocalFileSystem(), str(expanded(self.local))

    def _tried(self, action: Callable[[Any, str], T]) -> T:
        end, pause = time.monotonic() + self.patience, PAUSES[0]
        while True:
            try:
                return action(*self._opened())
            except Exception as error:  # clients of object stores fail with any class on the way
                if self._lasts(error) or time.monotonic() + pause > end:
                    raise _as_os_error(error, self.url) from error
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, PAUSES[1])

    def _lasts(self, error: Exception) -> bool:
        """Whether the same would fail again. Object stores say EINVAL also of what was damaged on its way."""
        lasting = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
        if isinstance(error, (*lasting, ImportError, ValueError)):
            return True
        number = error.errno if isinstance(error, OSError) else None
        return number in LASTING or (number == errno.EINVAL and self.local is not None)


def _info(fs: Any, path: str) -> dict[str, Any]:
    """What a file system says of a path; nothing if it says that there is nothing. Its own `exists` takes every error
    for that.
    """
    fs.invalidate_cache()
    try:
        return dict(fs.info(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _as_os_error(error: Exception, url: str) -> OSError:
    if isinstance(error, OSError):
        number = error.errno or CLASSES.get(type(error), errno.EIO)
        text = error.strerror or str(error) or os.strerror(number)
    else:
        number, text = errno.EIO, f"{type(error).__name__}: {error}"
    return OSError(number, text, url)  # of the subclass that the number has
