"""Attempts of a run in its event store: each start of the ranks that trains has a number of its own."""

from __future__ import annotations

from megascale.core.storage import Location
from megascale.operate.store.schema import TABLES
from megascale.operate.store.table_files import all_files


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
