"""Remote files in a local folder: their blocks, each fetched once by the processes that share the folder.

    FOLDER/remote/NAME-DIGEST/000000000042    a block of BLOCK_BYTES; the digest is of URL, size and version
    FOLDER/remote/NAME-DIGEST/whole           a file that is needed whole, such as an index
    FOLDER/remote/used                        bytes of all blocks, which stay below `max_bytes`

Blocks that were not read for longest are removed first. Whole files are few, and stay. Each file ends with its
checksum; what does not fit it is fetched again. A process checks a block when it reads it first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from megascale.core.errors import DataError
from megascale.core.files import LEFTOVER_S, NO_LOCKS, build_once, exists, is_folder, temporary_path
from megascale.core.limits import os_error_hint, with_os_error_hint
from megascale.core.storage import Location
from megascale.data.read.checksum import (
    CHECKSUM_BYTES,
    check_file,
    file_with_checksum,
    is_intact,
    once_a_version,
    with_checksum,
)

BLOCK_BYTES = 1 << 20  # bytes of a block: samples are read in random order, and object stores charge by request
DOWNLOAD_BYTES = 16 << 20  # bytes of a whole file that are fetched at once
FETCHES = 16  # blocks that a process fetches at the same time
TOUCH_S = 60.0  # seconds after which the time of a block's last use is written again
KEPT_SHARE = 0.9  # share of `max_bytes` that is kept when blocks have to be removed
FETCHES_OF_DAMAGED = 3  # times that a copy is found damaged before the folder is given up


@dataclass(frozen=True)
class BlockCache:
    """The cache in `folder`. `retry_s`: seconds for which a failing access is tried again."""

    folder: Path
    max_bytes: int
    retry_s: float = 60.0

    def open(self, url: str, size: int, version: str) -> CachedFile:
        """Open a remote file for reading by ranges."""
        return CachedFile(self, Location(url, self.retry_s), size, self._place(url, size, version))

    def whole_file(self, url: str, size: int, version: str) -> Path:
        """The local copy of a remote file, and its checksum, downloaded by the first process to ask for it. A damaged
        copy is downloaded again.

        Raises: DataError
        """
        path, location = self._place(url, size, version) / "whole", Location(url, self.retry_s)

        def download() -> None:
            with file_with_checksum(path) as write:
                for start in range(0, size, DOWNLOAD_BYTES):
                    write(fetch(location, start, min(DOWNLOAD_BYTES, size - start)))

        def remove_if_damaged() -> None:
            try:
                check_file(path, size)
            except ValueError:
                path.unlink(missing_ok=True)
                raise

        with self.explained(url):
            for _ in range(FETCHES_OF_DAMAGED):
                build_once(path, download)
                with contextlib.suppress(ValueError, FileNotFoundError):  # removed here, or by another process
                    once_a_version(path, remove_if_damaged)
                    return path
            raise _damaged_again(path)

    @contextlib.contextmanager
    def explained(self, url: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            local = str(error.filename or "").startswith(str(self.folder))
            where = f"{self.folder}, which has copies of {url}," if local else url
            hint = os_error_hint(error, "check the storage and the network")
            hint = with_os_error_hint(error, "data.cache = another folder") if local else hint
            raise DataError(f"{where} cannot be used: {error.strerror or error}", hint=hint) from None

    def reserve(self, size: int) -> None:
        """Count `size` more bytes of blocks, and remove old blocks where they would not fit. Raises: OSError"""
        path = self._folder / "used"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            file.seek(0)
            text = file.read()
            used = int(text) if text.isdigit() else self._shrink(self.max_bytes)
            if used + size > self.max_bytes:
                used = self._shrink(int(KEPT_SHARE * self.max_bytes) - size)
            file.seek(0)
            file.truncate()
            file.write(str(used + size).encode())

    def fetch(self, blocks: Sequence[Block], fetched: Callable[[], object] = lambda: None) -> None:
        """Fetch blocks of any files, several at a time, and call `fetched` after each. Raises: DataError"""
        for _ in self._pool.map(Block.build, blocks):
            fetched()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(FETCHES, "fetch blocks")

    @property
    def _folder(self) -> Path:
        return self.folder / "remote"

    def _place(self, url: str, size: int, version: str) -> Path:
        digest = hashlib.sha256(f"{url}\n{size}\n{version}".encode()).hexdigest()[:20]
        return self._folder / f"{Location(url).name[:64]}-{digest}"

    def _shrink(self, max_bytes: int) -> int:
        """Remove the blocks that were not read for longest, down to `max_bytes`, and what killed processes have left of
        others. Returns the bytes that stay.
        """
        blocks = []
        for folder in os.scandir(self._folder):
            if is_folder(folder.path):
                for entry in os.scandir(folder):
                    with contextlib.suppress(FileNotFoundError):
                        facts = entry.stat()
                        if entry.name.isdigit():
                            blocks.append((facts.st_mtime_ns, facts.st_size, entry.path))
                        elif entry.name.endswith(".tmp") and time.time() - facts.st_mtime > LEFTOVER_S:
                            Path(entry.path).unlink()
        total = sum(size for _, size, _ in blocks)
        for _, size, path in sorted(blocks):
            if total <= max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
        return total


@dataclass(frozen=True)
class CachedFile:
    """A remote file of `size` bytes, whose blocks are in `place`."""

    cache: BlockCache
    location: Location
    size: int
    place: Path

    def read(self, start: int, stop: int) -> bytes:
        """Read bytes [start, stop), fewer at the end of the file.

        Raises: DataError for storage that fails, and a cache that cannot be written
        """
        stop, parts = min(stop, self.size), []
        with self.cache.explained(self.location.url):
            while start < stop:
                number, within = divmod(start, BLOCK_BYTES)
                count = min(stop - start, BLOCK_BYTES - within)
                parts.append(self._read_block(number, within, count))
                start += count
        return b"".join(parts)

    def missing(self, ranges: Iterable[tuple[int, int]]) -> list[Block]:
        """Return the blocks of byte ranges [start, stop) that are not in the cache."""
        numbers = {n for start, stop in ranges for n in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))}
        return [Block(self, number) for number in sorted(numbers) if not exists(self._path(number))]

    def _read_block(self, number: int, within: int, count: int) -> bytes:
        path, damaged = self._path(number), 0
        while True:
            with contextlib.suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
                if self._is_intact(file.fileno(), number):
                    return os.pread(file.fileno(), count, within)
                path.unlink(missing_ok=True)
                damaged += 1
            if damaged == FETCHES_OF_DAMAGED:
                raise _damaged_again(path)
            self.build(number)

    def _is_intact(self, file: int, number: int) -> bool:
        """Check the size of a block, and at the first read by this process the checksum. Renew the time of last use."""
        size, facts = self._block_size(number) + CHECKSUM_BYTES, os.fstat(file)
        if facts.st_size != size or not (self._checked[number] or is_intact(os.pread(file, size, 0))):
            return False
        self._checked[number] = True
        if time.time() - facts.st_mtime > TOUCH_S:
            os.utime(file)
        return True

    @cached_property
    def _checked(self) -> bytearray:
        return bytearray(-(-self.size // BLOCK_BYTES))

    def build(self, number: int) -> None:
        """Fetch a block, unless another process does. Raises: OSError"""
        build_once(self._path(number), lambda: self._fetch(number))

    def _fetch(self, number: int) -> None:
        """Fetch a block, into a file that appears when it is whole."""
        data = with_checksum(fetch(self.location, number * BLOCK_BYTES, self._block_size(number)))
        self.cache.reserve(len(data))
        path = self._path(number)
        temporary = temporary_path(path)
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _block_size(self, number: int) -> int:
        return min(BLOCK_BYTES, self.size - number * BLOCK_BYTES)

    def _path(self, number: int) -> Path:
        return self.place / f"{number:012}"


@dataclass(frozen=True)
class Block:
    """A block of a remote file, by its number."""

    file: CachedFile
    number: int

    def build(self) -> None:
        """Fetch it into the cache, unless another process does. Raises: DataError"""
        with self.file.cache.explained(self.file.location.url):
            self.file.build(self.number)


@dataclass(frozen=True)
class RemoteTokens:
    """The tokens of a remote file; `tokens[start:stop]` reads a range."""

    file: CachedFile
    dtype: np.dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.file.size // self.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        return np.frombuffer(self.file.read(start * self.itemsize, stop * self.itemsize), self.dtype)

    def missing(self, ranges: Iterable[tuple[int, int]]) -> list[Block]:
        """Return the blocks of ranges [start, stop) of tokens that are not in the cache."""
        return self.file.missing((start * self.itemsize, stop * self.itemsize) for start, stop in ranges)


def fetch(location: Location, start: int, count: int) -> bytes:
    """Read `count` bytes of a remote file. Raises: DataError for a file that is shorter; OSError"""
    buffer = bytearray(count)
    found = location.read_into(memoryview(buffer), start)
    if found != count:
        what = f"{location} ends after {start + found} bytes: it was replaced while it is read"
        raise DataError(what, hint="files of a dataset must stay as they are while a run reads them")
    return bytes(buffer)


def _damaged_again(path: Path) -> OSError:
    return OSError(errno.EIO, "copies there do not stay as they were written", str(path))
