"""Queries of a run's event store with DuckDB: a view for each table of `store.schema`.

- `open_store`: a connection that reads the store's files, and no others; it writes none
- `fetch`: the columns of a query as numpy arrays, `fetch_coded`: with text as codes
- `answer`: the rows of a user's query, which must be a SELECT
- `store_of`: where the store of a run is

A run that goes on merges its files: `store.reading` reads again where one has gone meanwhile.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.core.errors import Exit, MegascaleError
from megascale.core.files import is_file, is_folder
from megascale.core.named_run import no_run
from megascale.core.storage import Location
from megascale.operate.store.schema import TABLES
from megascale.operate.store.table_files import STORE_FOLDER, TableFile, arrow_schema, list_files

if TYPE_CHECKING:
    import duckdb
    import numpy as np
    import pyarrow as pa

NEWEST_STEP = "(SELECT coalesce(max(step), 0) FROM steps WHERE attempt = (SELECT max(attempt) FROM steps))"
"""The newest step of the last attempt, in SQL."""

_STORE_TABLES = TABLES.keys() - {STORE_FOLDER}
"""Tables whose folders are in no run's folder: a store's own folder has the name of one of its tables."""


class StoreError(MegascaleError):
    """A run without an event store, or a query that cannot be answered."""

    exit_status = Exit.CONFIG


class StoreReadError(StoreError):
    """A query without an answer from the store's files: a file may have gone, or be damaged."""


def store_of(run: str | Path) -> Location:
    """Find the event store of a run, by the run's folder or by the store itself: a local path or a URL of fsspec.

    Raises: StoreError if there is none
    """
    given, config = Location(str(run), retry_s=0), dict[str, Any]()
    places = [given / STORE_FOLDER, given]
    try:
        if given.local_path is not None and is_file(file := given.local_path / "config.toml"):
            with contextlib.suppress(ValueError, OSError):
                config = tomllib.loads(file.read_text(encoding="utf-8"))
        if (parent := config.get("observe", {}).get("store_dir")) and "name" in config:
            places.insert(0, Location(f"{parent}/{config['name']}", retry_s=0))
        for place in places:
            if _STORE_TABLES & set(place.list_names()):
                return place
    except OSError as error:
        raise StoreError(f"{run}: cannot be read: {error.strerror or error}", hint="check path and access") from None
    if not given.exists() or (given.local_path is not None and not is_folder(given.local_path)):
        raise StoreError((missing := no_run(run)).message, hint=missing.hint)
    hint = "a run writes one unless observe.event_store or observe.record_events is false; the first rows come with "
    hint += "its first steps"
    raise StoreError(f"{run}: no event store", hint=hint)


BATCH_ROWS = 1_000_000  # rows of a batch of `fetch_coded`, whose texts are in memory
TRIES = 5  # times that the files of a live run are listed, until all of them can be opened


def open_store(
    run: str | Path, *, last_s: float | None = None, threads: int | None = None, without: Collection[str] = (),
    tables: Collection[str] = TABLES,
) -> duckdb.DuckDBPyConnection:  # fmt: skip
    """Open the event store of a run: a view for each table, over the files that there are now. A table without files is
    an empty view. `last_s`: only the files with the rows of the newest seconds. `threads`: by default one a core.
    `without`: paths of files to leave out. `tables`: by default all; a large job has many files.

    A query fails if a file of a live run was replaced meanwhile; `store.reading.read_store` tries again.
    Raises: StoreError
    """
    import duckdb

    store = store_of(run)
    for _ in range(TRIES):
        try:
            return _open_files(store, stored_files(store, last_s, tables), threads, without)
        except (duckdb.Error, UnicodeDecodeError, OSError) as error:  # replaced since it was listed, or damaged
            reason = _first_line(error)
    raise StoreReadError(f"{store}: cannot be read: {reason}", hint="check the store, and try again")


def stored_files(
    store: Location, last_s: float | None = None, tables: Collection[str] = TABLES
) -> dict[str, list[TableFile]]:
    """List the files of tables. `last_s`: only those with the rows of the newest seconds, and of all ranks.

    Raises: StoreError
    """
    try:
        files = {table: list_files(store, table) for table in tables}
    except OSError as error:
        raise StoreError(f"{store}: cannot be read: {error.strerror}", hint="check path and access") from None
    if last_s is None:
        return files
    since_ms = max((file.end_ms for found in files.values() for file in found), default=0) - 1000 * last_s
    return {
        table: found if table == "ranks" else [file for file in found if file.end_ms >= since_ms]
        for table, found in files.items()
    }


def _open_files(
    store: Location, files: Mapping[str, Sequence[TableFile]], threads: int | None, without: Collection[str]
) -> duckdb.DuckDBPyConnection:
    """Open the files of tables. Raises: duckdb.Error for a file that cannot be opened"""
    import duckdb

    connection = duckdb.connect(config={"autoload_known_extensions": False, "temp_directory": ""})
    if threads is not None:
        connection.execute(f"SET threads = {threads}")
    paths: list[str] = []
    for table, listed in files.items():
        found = [path for file in listed if (path := str(store / file.path)) not in without]
        _make_view(connection, store, table, found)
        paths += found
    local = store.local_path is not None  # a remote store's files are read by pyarrow
    connection.execute("SET allowed_paths = " + _literals(paths if local else []))
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _make_view(connection: duckdb.DuckDBPyConnection, store: Location, table: str, paths: Sequence[str]) -> None:
    if not paths:
        connection.register(table, arrow_schema(table).empty_table())
    elif store.local_path is not None:
        grown = table in ("ranks", "step_parts")  # files of earlier versions have fewer columns
        first = "(SELECT '' AS group_name LIMIT 0) UNION ALL BY NAME " if table == "step_parts" else ""
        rows = f"{first}FROM read_parquet({_literals(paths)}, union_by_name = {grown})"
        connection.execute(f"CREATE VIEW {table} AS {rows}")
    else:
        import pyarrow.dataset
        from fsspec.core import url_to_fs

        fs, _ = url_to_fs(str(store))
        inside = [fs._strip_protocol(path) for path in paths]
        rows = pyarrow.dataset.dataset(inside, schema=arrow_schema(table), filesystem=fs, format="parquet")
        connection.register(table, rows)


def _literals(texts: Sequence[str]) -> str:
    return "[" + ", ".join("'" + text.replace("'", "''") + "'" for text in texts) + "]"


def fetch(connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any] = ()) -> dict[str, np.ndarray]:
    """Return the columns of a query by name: numbers as arrays of their type, text as arrays of str; NULL is nan in
    floats, and masked in other columns.

    Raises: StoreError if DuckDB refuses the query; StoreReadError if it cannot answer, such as for a file that has gone
    """
    import duckdb
    import numpy as np

    try:
        columns = connection.execute(sql, list(parameters)).fetchnumpy()
    except (duckdb.Error, UnicodeDecodeError) as error:
        raise read_error(error) from error
    return {
        name: np.ma.filled(column, np.nan) if column.dtype.kind == "f" else column for name, column in columns.items()
    }


Row = dict[str, Any]
"""A row of a query, by column."""


def fetch_rows(connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
    """Return the rows of a query as `fetch` reads them, with values of Python. Raises: as `fetch`"""
    found = fetch(connection, sql, parameters)
    rows = zip(*(column.tolist() for column in found.values()), strict=True)
    return [dict(zip(found, row, strict=True)) for row in rows]


def fetch_coded(connection: duckdb.DuckDBPyConnection, sql: str) -> dict[str, np.ndarray | pa.DictionaryArray]:
    """Return the columns of a query of many rows without NULL: numbers as arrays of their type, text as codes: a text
    for each row would fill memory, and take long to make. Raises: as `fetch`
    """
    import duckdb
    import numpy as np
    import pyarrow as pa

    chunks: dict[str, list[Any]] = {}
    try:
        with connection.sql(sql).to_arrow_reader(BATCH_ROWS) as reader:
            chunks = {name: [] for name in reader.schema.names}
            for batch in reader:
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    text = pa.types.is_string(column.type)
                    chunks[name].append(column.dictionary_encode() if text else column.to_numpy().copy())
            types = {field.name: field.type for field in reader.schema}
    except (duckdb.Error, UnicodeDecodeError, OSError) as error:  # OSError: after the first batch, from pyarrow
        raise read_error(error) from error
    coded = pa.dictionary(pa.int32(), pa.string())
    return {
        name: pa.chunked_array(chunks.pop(name), coded).unify_dictionaries().combine_chunks()
        if pa.types.is_string(kind)
        else np.concatenate([np.empty(0, kind.to_pandas_dtype()), *chunks.pop(name)])
        for name, kind in types.items()
    }


def read_error(error: duckdb.Error | UnicodeDecodeError | OSError) -> StoreError:
    """Return the error of a query in the user's words."""
    what = f"the event store cannot be read: {_first_line(error)}"
    return _error_type(error)(what, hint="check the store, and try again")


def _error_type(error: duckdb.Error | UnicodeDecodeError | OSError) -> type[StoreError]:
    """Return StoreReadError if a file that has gone or is damaged may be the cause, StoreError if it is the query."""
    import duckdb

    if isinstance(error, UnicodeDecodeError | OSError):  # such as DuckDB's message about a column of a damaged name
        return StoreReadError
    if isinstance(error, duckdb.ConversionException | duckdb.OutOfRangeException):
        return StoreError
    of_files = type(error) is duckdb.Error or isinstance(error, duckdb.IOException | duckdb.InternalException)
    words = ("parquet", "stream registered")  # the file's name or format, or what pyarrow reads
    return StoreReadError if of_files or any(word in _first_line(error).lower() for word in words) else StoreError


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@dataclass(frozen=True)
class Answer:
    """The rows of a query, and the names of their columns."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


def answer(connection: duckdb.DuckDBPyConnection, sql: str) -> Answer:
    """Return the rows of a user's query.

    Raises: StoreError if it is not one SELECT, or DuckDB refuses it; StoreReadError if it fails as it reads
    """
    import duckdb

    try:
        statements = connection.extract_statements(sql)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise StoreError(
                "the query is not a single SELECT", hint="the event store is only read; see --list for examples"
            )
        result = connection.execute(statements[0])
        return Answer([column[0] for column in result.description], result.fetchall())
    except (duckdb.Error, UnicodeDecodeError) as error:
        text = str(error).strip().partition("\n\nLINE")[0]
        hint = f"tables: {', '.join(TABLES)}; see --schema"
        raise _error_type(error)(f"the query failed: {text}", hint=hint) from error
