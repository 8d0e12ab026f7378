"""Reading of an event store with files that come and go, and damaged ones.

`read_store` reads again after a listed file has gone: a live run merges its small files. Unreadable files are left out,
and told: where the same file fails again, all listed ones are read to find them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from megascale.core.storage import Location
from megascale.operate.store.query import TRIES, StoreReadError, open_store, read_error, store_of, stored_files
from megascale.operate.store.schema import TABLES

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")


@dataclass(frozen=True)
class Reading(Generic[T]):
    """The result of a reading. `damaged`: paths of files left out; `notes`: a line about each for the user."""

    value: T
    damaged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_store(
    run: str | Path, read: Callable[[duckdb.DuckDBPyConnection], T], *,
    last_s: float | None = None, threads: int | None = None, tables: Collection[str] = TABLES, search: bool = True,
) -> Reading[T]:  # fmt: skip
    """Return the result of `read` for the store of a run (`open_store`), opened anew while files go. `search`: look for
    damaged files, which takes as long as all listed ones have bytes; else they are an error.

    Raises: StoreError, and what `read` raises
    """
    import duckdb

    damaged: dict[str, str] = {}
    failures: list[str] = []
    while True:
        try:
            with open_store(run, last_s=last_s, threads=threads, without=damaged, tables=tables) as store:
                return Reading(read(store), tuple(damaged), tuple(damaged.values()))
        except (StoreReadError, duckdb.Error, UnicodeDecodeError) as error:
            told = error if isinstance(error, StoreReadError) else read_error(error)
            if not isinstance(told, StoreReadError):
                raise told from None
            named = re.search(r"[^\s\"']+?\.parquet", str(told))
            failure = named[0] if named else str(told)
            again = failure in failures  # at first a file may have gone
            found = damaged_files(store_of(run), damaged, last_s, tables) if again and search else {}
            if not found and (again or len(failures) >= TRIES):
                raise told from None
            failures.append(failure)
            damaged |= found


def damaged_files(
    store: Location, known: Collection[str] = (), last_s: float | None = None, tables: Collection[str] = TABLES
) -> dict[str, str]:
    """Return a line about each unreadable file of a store by path, without the `known` files. Reads all files.
    `last_s`, `tables`: of `stored_files`.

    Raises: StoreError
    """
    files = (store / file.path for files in stored_files(store, last_s, tables).values() for file in files)
    notes = {str(file): _damage(file) for file in files if str(file) not in known}
    return {path: note for path, note in notes.items() if note}


def _damage(file: Location) -> str:
    """Return a line about an unreadable file, "" for a good file and for a missing file."""
    import duckdb
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        data = file.read()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{file} cannot be read: {error.strerror or error}; its rows are missing; check its permissions"
    try:
        if file.local_path is None:
            pq.read_table(io.BytesIO(data))
            return ""
        rows, given = "read_parquet([$path]) rows", {"path": str(file)}
        with duckdb.connect() as connection:  # all rows, and the names of the columns
            connection.execute(f"SELECT max(hash(rows)) FROM {rows}", given)
            connection.execute(f"FROM {rows} LIMIT 0", given).fetchnumpy()
    except (pa.ArrowException, duckdb.Error, UnicodeDecodeError, OSError):
        return f"{file} is damaged; its rows are missing; remove it" if file.exists() else ""
    return ""
