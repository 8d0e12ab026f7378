"""Rows of a store's tables for tests: every column has a value."""

from __future__ import annotations

from typing import Any

from megascale.eventstore.schema import TABLES


def rows(table: str, count: int = 1, **columns: Any) -> dict[str, list[Any]]:
    """Return `count` rows of a table. `columns`: a value for all rows, or a list; other numbers are 0, texts empty."""
    defaults = {column.name: "" if column.type == "text" else 0 for column in TABLES[table]}
    return {
        name: value if isinstance(value, list) else [value] * count for name, value in {**defaults, **columns}.items()
    }
