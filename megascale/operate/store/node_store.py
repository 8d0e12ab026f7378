"""The files of one node in an event store: written for each interval, merged as they grow in number, removed as they
grow in size or age.

Files of an interval are level 0; FAN_IN neighbours of a level make one of the next, so that the number of a node's
files grows with the logarithm of time. Covered files stay for GRACE_S, for readers with an older list.
"""

from __future__ import annotations

import errno
import io
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megascale.core.files import exists
from megascale.core.run_folder import check_not_lost
from megascale.core.storage import Location
from megascale.operate.store.schema import TABLES
from megascale.operate.store.settings import StoreSettings
from megascale.operate.store.table_files import (
    Columns,
    TableFile,
    all_files,
    arrow_schema,
    uncovered,
    write_rows,
    write_table,
)

if TYPE_CHECKING:
    import pyarrow as pa

FAN_IN = 8  # files that are merged at once
MAX_MERGED_BYTES = 8 << 20  # largest sum of files that are merged, which are read into ten times the memory

GRACE_S = 300.0
"""Seconds until a covered file is removed: the longest reading of a live store. With thousands of nodes some file is
covered at every moment, and an analysis opens each file several times.
"""

_SETTLED = 99  # level of files that are merged no more
_PRUNED = ("events", "step_parts", "expert_loads", "host_metrics", "steps")  # whose oldest files go, in this order


@dataclass
class _Written:
    file: TableFile
    size: int
    level: int
    covered: float = 0.0
    """Start of the time as a covered file, as `time.monotonic`."""


class NodeStore:
    """The files of `settings.node` and an attempt. `say`: for messages. Every method raises OSError."""

    def __init__(self, settings: StoreSettings, attempt: int, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._store = Location(settings.url, retry_s=0)
        self._node = re.sub(r"[^\w.-]", "_", settings.node)
        self._attempt = attempt
        self._say = say
        self._begin_ms = _now_ms()
        self._covered: list[_Written] = []
        self._files: dict[str, list[_Written]] = {}
        for table in TABLES:  # files of this node's earlier attempts count for its size
            files = [file for file in all_files(self._store, table) if file.node == self._node]
            kept = dict.fromkeys(uncovered(files))
            # left from earlier collectors; their sizes are small
            self._cover([_Written(file, 0, _SETTLED) for file in files if file not in kept])
            self._files[table] = [_Written(file, (self._store / file.path).size(), _SETTLED) for file in kept]

    def write(self, table: str, columns: Columns, start_ms: int, end_ms: int) -> None:
        """Write the rows of an interval."""
        self._write(table, columns, start_ms, end_ms)
        self._merge(table)

    def replace(self, table: str, columns: Columns) -> None:
        """Write a table of this node and attempt anew."""
        old = [written for written in self._files[table] if written.file.attempt == self._attempt]
        start_ms = min([self._begin_ms, *(written.file.start_ms for written in old)])
        end_ms = max([_now_ms(), *(written.file.end_ms + 1 for written in old)])
        self._write(table, columns, start_ms, end_ms)
        self._files[table] = [written for written in self._files[table] if written not in old]
        self._cover(old)

    def discard(self, table: str) -> None:
        """Remove a table of this node and attempt."""
        for written in [written for written in self._files[table] if written.file.attempt == self._attempt]:
            self._forget(table, written)

    def prune(self) -> None:
        """Remove files covered for GRACE_S, single events that are too old, and the oldest files while there are too
        many bytes.
        """
        while self._covered and self._covered[0].covered <= time.monotonic() - GRACE_S:
            self._remove(self._covered[0])
        events = self._files["events"]
        while events and events[0].file.end_ms < _now_ms() - self._settings.events_h * 3_600_000:
            self._forget("events", events[0])
        for table in _PRUNED:
            while self._files[table] and self._settings.max_bytes < sum(
                written.size for files in (*self._files.values(), self._covered) for written in files
            ):
                self._forget(table, self._files[table][0])

    def _write(self, table: str, columns: Columns, start_ms: int, end_ms: int) -> None:
        place = self._store.local_path
        if place is not None and self._settings.in_run:
            check_not_lost(place)
        if any(self._files.values()) and place is not None and not exists(place):
            raise FileNotFoundError(errno.ENOENT, "the event store is lost", str(place))
        file = TableFile(table, self._node, self._attempt, start_ms, end_ms)
        written, files = _Written(file, write_rows(self._store, file, columns), 0), self._files[table]
        if files and files[-1].file == file:  # written before, and again because its merge had failed
            files.pop()
        files.append(written)

    def _merge(self, table: str) -> None:
        import pyarrow as pa

        files = self._files[table]
        while (level := files[-1].level) < _SETTLED:
            group = [written for written in files[-FAN_IN:] if written.level == level]
            if len(group) < FAN_IN:
                return
            if sum(written.size for written in group) > MAX_MERGED_BYTES:
                for written in group:
                    written.level = _SETTLED
                return
            parts = [rows for written in group if (rows := self._rows(table, written)) is not None]
            if len(parts) < FAN_IN:  # without the unreadable ones, as soon as there are enough
                return
            file = TableFile(table, self._node, self._attempt, group[0].file.start_ms, group[-1].file.end_ms)
            rows = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
            files[-FAN_IN:] = [_Written(file, write_table(self._store, file, rows), level + 1)]
            self._cover(group)

    def _rows(self, table: str, written: _Written) -> pa.Table | None:
        """Read a file for a merge; None for a removed or damaged file, which later merges leave out: the rows of other
        intervals are stored all the same.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        place = self._store / written.file.path
        try:
            rows = pq.read_table(io.BytesIO(place.read()))
            if rows.schema.equals(arrow_schema(table)):
                return rows
            reason = "it has other columns"
        except FileNotFoundError:
            self._files[table].remove(written)
            return None
        except (pa.ArrowException, OSError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
        written.level = _SETTLED
        self._say(f"WARNING: {place} is not merged with other files: {reason}; remove it if it is damaged")
        return None

    def _cover(self, files: list[_Written]) -> None:
        """Keep covered files for GRACE_S."""
        for written in files:
            written.covered = time.monotonic()
        self._covered += files

    def _forget(self, table: str, written: _Written) -> None:
        """Remove a file, and first the files covered by this one, which would count then."""
        for part in [part for part in self._covered if written.file.covers(part.file)]:
            self._remove(part)
        (self._store / written.file.path).remove()
        self._files[table].remove(written)

    def _remove(self, covered: _Written) -> None:
        (self._store / covered.file.path).remove()
        self._covered.remove(covered)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
