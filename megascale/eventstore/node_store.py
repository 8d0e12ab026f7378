"""The files of one node in an event store: written for each interval, merged as they grow in number, removed as they
grow in size or age.

Files of an interval are level 0; FAN_IN neighbours of a level make one of the next, so that the number of a node's
files grows with the logarithm of time. Parts of a merged file are removed at the next write, for readers that have just
listed them.
"""

from __future__ import annotations

import io
import re
import time
from dataclasses import dataclass

from megascale.core.storage import Location
from megascale.eventstore.schema import TABLES
from megascale.eventstore.settings import StoreSettings
from megascale.eventstore.table_files import Columns, TableFile, list_files, write_rows, write_table

FAN_IN = 8
"""Files that are merged at once."""

MAX_MERGED_BYTES = 8 << 20
"""Largest sum of files that are merged, which are read into ten times the memory."""

_SETTLED = 99
"""Level of files that are merged no more."""

_PRUNED = ("events", "step_parts", "host_metrics", "steps")
"""Tables whose oldest files are removed for others' sake, in this order."""


@dataclass
class _Written:
    file: TableFile
    size: int
    level: int


class NodeStore:
    """The files of `settings.node` and an attempt. Every method raises OSError."""

    def __init__(self, settings: StoreSettings, attempt: int) -> None:
        self._settings = settings
        self._store = Location(settings.url, retry_s=0)
        self._node = re.sub(r"[^\w.-]", "_", settings.node)
        self._attempt = attempt
        self._begin_ms = _now_ms()
        self._files: dict[str, list[_Written]] = {table: self._earlier(table) for table in TABLES}
        self._covered: list[TableFile] = []

    def _earlier(self, table: str) -> list[_Written]:
        """Find the files of this node's earlier attempts, which count for its size."""
        files = [file for file in list_files(self._store, table) if file.node == self._node]
        return [_Written(file, (self._store / file.path).size(), _SETTLED) for file in files]

    def write(self, table: str, columns: Columns, start_ms: int, end_ms: int) -> None:
        """Write the rows of an interval."""
        self._remove_covered()
        self._write(table, columns, start_ms, end_ms)
        self._merge(table)

    def replace(self, table: str, columns: Columns) -> None:
        """Write a table of this node and attempt anew."""
        old = [written for written in self._files[table] if written.file.attempt == self._attempt]
        self._write(table, columns, self._begin_ms, max(_now_ms(), *(written.file.end_ms + 1 for written in old), 0))
        for written in old:
            self._forget(table, written)

    def discard(self, table: str) -> None:
        """Remove a table of this node and attempt."""
        for written in [written for written in self._files[table] if written.file.attempt == self._attempt]:
            self._forget(table, written)

    def prune(self) -> None:
        """Remove single events that are too old, and the oldest files while there are too many bytes."""
        events = self._files["events"]
        while events and events[0].file.end_ms < _now_ms() - self._settings.events_h * 3_600_000:
            self._forget("events", events[0])
        size = sum(written.size for files in self._files.values() for written in files)
        for table in _PRUNED:
            while size > self._settings.max_bytes and self._files[table]:
                size -= self._files[table][0].size
                self._forget(table, self._files[table][0])

    def _write(self, table: str, columns: Columns, start_ms: int, end_ms: int) -> None:
        file = TableFile(table, self._node, self._attempt, start_ms, end_ms)
        written, files = _Written(file, write_rows(self._store, file, columns), 0), self._files[table]
        if files and files[-1].file == file:  # written before, and again because its merge had failed
            files.pop()
        files.append(written)

    def _merge(self, table: str) -> None:
        files = self._files[table]
        while (level := files[-1].level) < _SETTLED:
            group = [written for written in files[-FAN_IN:] if written.level == level]
            if len(group) < FAN_IN:
                return
            if sum(written.size for written in group) > MAX_MERGED_BYTES:
                for written in group:
                    written.level = _SETTLED
                return
            files[-FAN_IN:] = [self._merged(group)]
            self._covered += [written.file for written in group]

    def _merged(self, group: list[_Written]) -> _Written:
        import pyarrow as pa
        import pyarrow.parquet as pq

        first, last = group[0].file, group[-1].file
        parts = [pq.read_table(io.BytesIO((self._store / written.file.path).read())) for written in group]
        file = TableFile(first.table, self._node, self._attempt, first.start_ms, last.end_ms)
        rows = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
        return _Written(file, write_table(self._store, file, rows), group[0].level + 1)

    def _remove_covered(self) -> None:
        while self._covered:
            (self._store / self._covered[-1].path).remove()
            self._covered.pop()

    def _forget(self, table: str, written: _Written) -> None:
        (self._store / written.file.path).remove()
        self._files[table].remove(written)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
