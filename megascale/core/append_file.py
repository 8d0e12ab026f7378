"""A file to which records are appended, each whole or not at all; what cannot be written now is written later."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path

from megascale.core.files import exists
from megascale.core.run_folder import check_not_lost

MAX_PENDING = 10_000  # most records kept in memory while the file cannot be written; older ones are dropped


class AppendFile:
    """A file opened for every append: a file system that was away, or a removed file, does no lasting harm.

    `in_run`: the file is in a run's folder, and once it was there it is not made anew in an empty place. `dropped`:
    records lost because too many were pending.
    """

    def __init__(self, path: Path, *, in_run: bool = False) -> None:
        self._path = path
        self._must_be_there = in_run and exists(path)
        self._in_run = in_run
        self._pending: deque[bytes] = deque()
        self.dropped = 0

    @property
    def pending(self) -> int:
        """Number of records that are not in the file yet."""
        return len(self._pending)

    def append(self, record: bytes) -> None:
        """Append a record, after all that are pending. Raises: OSError; the record is pending then."""
        self._pending.append(record)
        try:
            self.flush()
        finally:
            while len(self._pending) > MAX_PENDING:
                self._pending.popleft()
                self.dropped += 1

    def flush(self) -> None:
        """Write the pending records. Raises: OSError"""
        if not self._pending:
            return
        if self._must_be_there:
            check_not_lost(self._path)
        with open(self._path, "ab", buffering=0) as file:
            self._must_be_there = self._in_run
            while self._pending:
                end = file.seek(0, os.SEEK_END)
                try:
                    rest = memoryview(self._pending[0])
                    while rest:  # a disk that fills up takes a part, and refuses the rest with an error
                        rest = rest[os.write(file.fileno(), rest) :]
                except OSError:
                    with contextlib.suppress(OSError):
                        file.truncate(end)  # a part of a record would spoil the next
                    raise
                self._pending.popleft()
