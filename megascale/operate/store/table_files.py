"""The files of an event store, STORE/TABLE/NODE.ATTEMPT.START-END.parquet, with START and END in ms since 1970.

A file stands in the place of all files of its table, node and attempt whose spans lie in its own: merged files are
written before their parts are removed, and readers count no row twice.

- `TableFile`: a name; `list_files`: the files that count
- `begin_attempt`: each start of the ranks that trains has a number of its own
- `write_rows`: rows as a file, written atomically
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megascale.core.storage import Location
from megascale.operate.store.schema import TABLES

if TYPE_CHECKING:
    import pyarrow as pa

STORE_FOLDER = "events"  # folder of the event store in a run's folder

Columns = dict[str, Any]
"""Columns of a table by name: arrays or lists of equal length, of text also dictionary arrays of pyarrow."""

_NAME = re.compile(r"(?P<node>.+)\.(?P<attempt>\d+)\.(?P<start>\d+)-(?P<end>\d+)\.parquet")


@dataclass(frozen=True, order=True)
class TableFile:
    """The file of a table with the rows that a node wrote from `start_ms` to `end_ms`."""

    table: str
    node: str
    attempt: int
    start_ms: int
    end_ms: int

    @property
    def path(self) -> str:
        """The path in the store."""
        node = re.sub(r"[^\w.-]", "_", self.node)
        return f"{self.table}/{node}.{self.attempt}.{self.start_ms:013d}-{self.end_ms:013d}.parquet"

    @classmethod
    def from_name(cls, table: str, name: str) -> TableFile | None:
        """Parse the name of a file in a table's folder; None for another file, such as one that is being written."""
        match = _NAME.fullmatch(name)
        if match is None or name.startswith("."):
            return None
        return cls(table, match["node"], int(match["attempt"]), int(match["start"]), int(match["end"]))

    def covers(self, other: TableFile) -> bool:
        """Return True if this file stands in the place of `other`."""
        same = (self.table, self.node, self.attempt) == (other.table, other.node, other.attempt)
        return same and self != other and self.start_ms <= other.start_ms and other.end_ms <= self.end_ms


def list_files(store: Location, table: str) -> list[TableFile]:
    """List the files of a table that no other file covers, by node, attempt and time.

    Raises: OSError
    """
    return uncovered(all_files(store, table))


def all_files(store: Location, table: str) -> list[TableFile]:
    """List the files of a table, covered files too. Raises: OSError"""
    return [file for name in (store / table).list_names() if (file := TableFile.from_name(table, name)) is not None]


def uncovered(files: Iterable[TableFile]) -> list[TableFile]:
    """Leave out the files of a table that others cover."""
    kept: list[TableFile] = []
    for file in sorted(files, key=lambda file: (file.node, file.attempt, file.start_ms, -file.end_ms)):
        if not (kept and kept[-1].covers(file)):
            kept.append(file)
    return kept


def begin_attempt(store: Location, attempt: int, *, new_run: bool) -> int:
    """Return the number of an attempt that begins: `attempt` as its launcher counts, or one above those in the store. A
    new run removes the tables of an earlier run.

    Raises: OSError
    """
    found = {table: all_files(store, table) for table in TABLES}
    if not new_run:
        return max([attempt, *(file.attempt + 1 for file in found["ranks"])])
    for files in found.values():
        for file in files:
            (store / file.path).remove()
    return attempt


def write_rows(store: Location, file: TableFile, columns: Columns) -> int:
    """Write rows, and return the bytes of the file.

    Raises: OSError; ValueError for other columns than the table's
    """
    return write_table(store, file, arrow_table(file.table, columns))


def write_table(store: Location, file: TableFile, rows: pa.Table) -> int:
    """Write the rows of `arrow_table`. Raises: OSError"""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = TABLES[file.table]
    buffer = pa.BufferOutputStream()
    pq.write_table(
        rows,
        buffer,
        compression="zstd",
        use_dictionary=[column.name for column in columns if column.type == "text"],
        column_encoding={column.name: "DELTA_BINARY_PACKED" for column in columns if column.type.startswith("int")},
    )
    data = buffer.getvalue().to_pybytes()
    target = store / file.path
    if target.local_path is not None:
        target.local_path.parent.mkdir(parents=True, exist_ok=True)
    target.write(data)
    return len(data)


def arrow_table(table: str, columns: Columns) -> pa.Table:
    """Make a table of pyarrow in the schema of `table`. Raises: ValueError for other columns than the table's"""
    import pyarrow as pa

    schema = arrow_schema(table)
    if columns.keys() != set(schema.names):
        raise ValueError(f"columns of {table}: {sorted(columns.keys() ^ set(schema.names))} are missing or not in it")
    return pa.table([pa.array(columns[field.name]).cast(field.type) for field in schema], schema=schema)


def arrow_schema(table: str) -> pa.Schema:
    """Return the schema of a table. Text is dictionary-encoded."""
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    types = {"text": text, "float64": pa.float64()}
    return pa.schema((c.name, types[c.type] if c.type in types else getattr(pa, c.type)()) for c in TABLES[table])
