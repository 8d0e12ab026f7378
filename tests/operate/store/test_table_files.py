"""Files of a store: names, which of them count, and what may be written."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale.core.storage import Location
from megascale.operate.store.schema import TABLES
from megascale.operate.store.table_files import TableFile, list_files, uncovered, write_rows
from tests.operate.store.tables import rows


def file(start: int, end: int, node: str = "n", attempt: int = 0) -> TableFile:
    return TableFile("steps", node, attempt, start, end)


@pytest.mark.parametrize("node", ["n", "node-3.rack.site", "gpu_7"])
def test_names_are_parsed(node: str) -> None:
    one = file(1_700_000_000_000, 1_700_000_010_000, node, 12)
    assert TableFile.from_name("steps", one.path.removeprefix("steps/")) == one


@pytest.mark.parametrize("name", [".n.0.1-2.parquet.77.tmp", "n.0.1-2.parquet.tmp", "rank-00000.jsonl", "n.0.parquet"])
def test_other_files_are_no_tables(name: str) -> None:
    assert TableFile.from_name("steps", name) is None


def test_a_node_s_name_cannot_leave_the_folder() -> None:
    assert file(1, 2, "../../x").path.startswith("steps/.._.._x.0.")


def test_a_merged_file_stands_in_the_place_of_its_parts() -> None:
    merged, later, other = file(10, 30), file(30, 40), file(10, 20, node="m")
    next_attempt = file(10, 20, attempt=1)
    assert uncovered([file(10, 20), file(20, 30), later, merged, other, next_attempt]) == [
        other, merged, later, next_attempt,
    ]  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
def test_every_table_is_written_in_its_schema(table: str, tmp_path: Path) -> None:
    store, one = Location(str(tmp_path)), TableFile(table, "n", 0, 1, 2)
    size = write_rows(store, one, rows(table, 3))
    written = pq.read_table(tmp_path / one.path)
    assert (tmp_path / one.path).stat().st_size == size
    assert [field.name for field in written.schema] == [column.name for column in TABLES[table]]
    assert written.num_rows == 3
    texts = [column.name for column in TABLES[table] if column.type == "text"]
    assert all(pa.types.is_dictionary(written.schema.field(name).type) for name in texts)
    assert list_files(store, table) == [one]


def test_columns_must_be_those_of_the_table(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="loss"):
        write_rows(Location(str(tmp_path)), file(1, 2), {k: v for k, v in rows("steps").items() if k != "loss"})
    with pytest.raises(ValueError, match="colour"):
        write_rows(Location(str(tmp_path)), file(1, 2), rows("steps") | {"colour": [1]})
    assert list(tmp_path.iterdir()) == []
