"""Files and folders in any file system of fsspec: local, HDFS, object stores. Transient errors are retried."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from megascale.core.files import PathError, absolute_path, atomic_file, sync_file
from megascale.core.readable import FileFacts
from megascale.core.wait_notice import WaitNotice

WRITE_HINT = "check that it is mounted, space, permissions"

T = TypeVar("T")

UPLOAD_BLOCK_BYTES = 32 << 20

PAUSES = 0.25, 10.0  # first and longest pause between attempts in seconds; every pause doubles the last

PERMANENT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG}
"""Error numbers not worth a retry, beside the errors with a class of their own."""

CREDENTIAL_ERRORS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError"}
"""Names of exceptions of botocore and google.auth for missing credentials."""

ERRNO_BY_CLASS = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, FileExistsError: errno.EEXIST}
"""Error number of exceptions raised without a number."""


RANGE_BYTES = 64 << 10


@dataclass(frozen=True)
class Location:
    """A file or a folder: `url` is a local path, or a URL of any fsspec file system.

    Transient errors are retried for `retry_s` seconds. Every method raises OSError, with `filename`.
    """

    url: str
    retry_s: float = 60.0

    def __truediv__(self, name: str) -> Location:
        return Location(f"{self.url.rstrip('/')}/{name}", self.retry_s)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def local_path(self) -> Path | None:
        """The path in this host's file system; None for a remote location."""
        path = self.url.removeprefix("file://").removeprefix("local://")
        return None if "://" in path else Path(path)

    def exists(self) -> bool:
        """Return True if a file or a folder is there. Raises: PathError"""
        return bool(self._look())

    def is_folder(self) -> bool:
        """Return True for a folder; in an object store, for a prefix with objects. Raises: PathError"""
        return self._look().get("type") == "directory"

    def _look(self) -> dict[str, Any]:
        try:
            return self._retry(_info)
        except OSError as error:
            raise PathError(self.url, error) from error

    def list_names(self) -> list[str]:
        """List the names in this folder, sorted; a missing folder has none."""

        def look(fs: Any, path: str) -> list[str]:
            fs.invalidate_cache()
            try:
                return sorted(Location(url).name for url in fs.ls(path, detail=False))
            except (FileNotFoundError, NotADirectoryError):
                return []

        return self._retry(look)

    def size(self) -> int:
        """Return the bytes of a file, or of all files in a folder."""
        return self._retry(lambda fs, path: fs.du(path))

    def facts(self) -> FileFacts:
        """Return the size and version of a file. Raises: FileNotFoundError"""
        found = self._retry(_info)
        if found.get("type") != "file":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url)
        return FileFacts(int(found["size"]), file_version(found))

    def make_folder(self) -> None:
        """Make a new folder and its parents, but no bucket of an object store.

        Raises: FileExistsError, FileNotFoundError without the bucket
        """

        def make(fs: Any, path: str) -> None:
            bucket = path.partition("/")[0]
            if bucket and ":" not in bucket and not _info(fs, bucket):  # an access point has no bucket to look up
                raise FileNotFoundError(errno.ENOENT, f"there is no {bucket}")
            fs.makedirs(path, exist_ok=False)

        self._retry(make)

    def check_writable(self) -> None:
        """Make the folder if it is missing, and write and remove a probe file in it."""
        if not self.exists():
            self.make_folder()
        file = self / f".probe-{os.getpid()}"
        file.write(b"1")
        file.remove()

    def read(self) -> bytes:
        """Read a file."""
        return self._retry(lambda fs, path: fs.cat_file(path))

    def read_into(self, buffer: memoryview, start: int) -> int:
        """Fill `buffer` from byte `start` of a file. Returns the bytes read, fewer at the end of the file."""

        def fill(fs: Any, path: str) -> int:
            if not buffer:  # an object store refuses an empty range
                return 0
            if self.local_path is None:
                data = fs.cat_file(path, start=start, end=start + len(buffer))
                buffer[: len(data)] = data
                return len(data)
            done = 0
            with open(path, "rb", buffering=0) as file:
                file.seek(start)
                while count := file.readinto(buffer[done:]):
                    done += count
            return done

        return self._retry(fill)

    def write(self, data: bytes) -> None:
        """Write a file atomically."""

        def put(fs: Any, path: str) -> None:
            if self.local_path is not None:
                with atomic_file(self.local_path) as file:
                    file.write(data)
                return
            fs.pipe_file(f"{path}.tmp", data)
            fs.mv(f"{path}.tmp", path)

        self._retry(put)

    def write_chunks(self, parts: Callable[[], Iterable[bytes | memoryview]]) -> None:
        """Write a file in parts, and sync it. A retry calls `parts` again; an error may leave a partial file."""

        def put(fs: Any, path: str) -> None:
            with fs.open(path, "wb", block_size=UPLOAD_BLOCK_BYTES) as file:
                for part in parts():
                    file.write(part)
            if self.local_path is not None:
                sync_file(self.local_path)

        self._retry(put)

    def remove(self) -> None:
        """Delete a file, a folder with its contents, or a link without its target. A missing file is no error."""

        def delete(fs: Any, path: str) -> None:
            if self.local_path is not None and self.local_path.is_symlink():
                self.local_path.unlink()
            elif _info(fs, path):
                fs.rm(path, recursive=True)
                if self.local_path is None and _info(fs, path):  # a bulk delete reports no errors
                    raise OSError(errno.EBUSY, "it is still there")

        self._retry(delete)

    def is_damage(self, error: OSError) -> bool:
        """Return True if an error in reading means a damaged file, and False for storage or permissions at fault."""
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            return True
        return error.errno == errno.EINVAL or (self.local_path is not None and error.errno == errno.EIO)

    def _retry(self, action: Callable[[Any, str], T]) -> T:
        """Call `action(file system, path)` until it succeeds, fails permanently, or `retry_s` is over."""
        end, pause = time.monotonic() + self.retry_s, PAUSES[0]
        notice = WaitNotice(self.url)
        while True:
            try:
                local = self.local_path  # it may contain `::`, which chains URLs in fsspec
                fs, path = url_to_fs(self.url) if local is None else (LocalFileSystem(), str(absolute_path(local)))
                return action(fs, path)
            except Exception as error:  # clients of object stores raise errors of any class
                if self._is_permanent(error) or time.monotonic() + pause > end:
                    raise _as_os_error(error, self.url) from error
                text = f"storage that failed: {error!r}"
            notice.print_if_due(lambda text=text: text)  # type: ignore[misc]
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, PAUSES[1])

    def _is_permanent(self, error: Exception) -> bool:
        """Return True if a retry would fail too. Object stores report damage in transit as EINVAL as well."""
        permanent = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
        if isinstance(error, (*permanent, ImportError, ValueError)) or type(error).__name__ in CREDENTIAL_ERRORS:
            return True
        number = error.errno if isinstance(error, OSError) else None
        return number in PERMANENT_ERRNOS or (number == errno.EINVAL and self.local_path is not None)


class RangedFile:
    """A file of any file system, read by ranges, with `seek` and `read` of a file object. Small reads share requests.

    Raises: OSError
    """

    def __init__(self, location: Location) -> None:
        facts = location.facts()
        self.size, self.version = facts.size, facts.version
        self._location = location
        self._place = 0
        self._blocks: dict[int, bytes] = {}

    def seek(self, place: int) -> None:
        self._place = place

    def read(self, count: int) -> bytes:
        stop, parts = min(self._place + count, self.size), []
        while self._place < stop:
            number, within = divmod(self._place, RANGE_BYTES)
            part = self._block(number)[within : within + stop - self._place]
            if not part:
                raise OSError(errno.EIO, "the file is shorter than its size", self._location.url)
            parts.append(part)
            self._place += len(part)
        return b"".join(parts)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            start = number * RANGE_BYTES
            buffer = bytearray(min(RANGE_BYTES, self.size - start))
            self._blocks[number] = bytes(buffer[: self._location.read_into(memoryview(buffer), start)])
        return self._blocks[number]


def _info(fs: Any, path: str) -> dict[str, Any]:
    """Return fsspec's info of a path; empty if it is missing. fsspec's own `exists` takes any error for missing."""
    fs.invalidate_cache()
    try:
        return dict(fs.info(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}


def file_version(facts: Mapping[str, Any]) -> str:
    """Return a text that differs after a change of a file, from fsspec's info of it; "" where nothing tells."""
    keys = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "updated", "created")
    return next((str(facts[key]) for key in keys if facts.get(key)), "")


def _as_os_error(error: Exception, url: str) -> OSError:
    """Return the OSError of an error, with a number that has a hint in `core.limits` where the kernel has no part."""
    unknown = errno.EIO if Location(url).local_path is not None else errno.EREMOTEIO
    if isinstance(error, OSError):
        number = error.errno or ERRNO_BY_CLASS.get(type(error), unknown)
        number = unknown if number == errno.EIO else number
        return OSError(number, error.strerror or str(error) or os.strerror(number), url)
    number = unknown
    if isinstance(error, ImportError):
        number = errno.ENOPKG
    elif type(error).__name__ in CREDENTIAL_ERRORS:
        number = errno.ENOKEY
    elif isinstance(error, ValueError) and str(error).startswith("Protocol not known"):
        number = errno.EPROTONOSUPPORT
    return OSError(number, f"{type(error).__name__}: {error}", url)  # Python picks the subclass of the number
