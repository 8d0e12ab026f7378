"""A run's store in DuckDB: views of all tables, and no way to another file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale.core.storage import Location
from megascale.operate.store import query
from megascale.operate.store.query import StoreError, StoreReadError, fetch, fetch_coded, open_store
from megascale.operate.store.schema import TABLES, has_rare_tag
from megascale.operate.store.table_files import TableFile, write_rows
from tests.operate.store.tables import rows


@pytest.fixture(params=["folder", "url"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A run with a store, in a folder with a difficult name, or elsewhere."""
    if request.param == "folder":
        return str(tmp_path / "it's [a] run")
    return f"memory://{tmp_path.name}"


def write(run: str, table: str, start: int, end: int, node: str = "n", **columns: object) -> None:
    count = max((len(v) for v in columns.values() if isinstance(v, list)), default=1)
    file = TableFile(table, node, 0, start, end)
    write_rows(Location(f"{run}/events"), file, rows(table, count, **columns))


def test_a_query_sees_the_rows_of_all_nodes_once(run: str) -> None:
    write(run, "step_parts", 1, 2, rank=[0, 1], total_ns=[5, 6], name="F")
    write(run, "step_parts", 2, 3, rank=[0, 1], total_ns=[7, 8], name="B")
    write(run, "step_parts", 1, 3, rank=[0, 1, 0, 1], total_ns=[5, 6, 7, 8], name=["F", "F", "B", "B"])
    write(run, "step_parts", 1, 2, node="m", rank=[2], total_ns=[9], name="F")
    found = fetch(open_store(run), "SELECT rank, sum(total_ns) AS ns FROM step_parts GROUP BY rank ORDER BY rank")
    assert found["rank"].tolist() == [0, 1, 2]
    assert found["ns"].tolist() == [12, 14, 9]
    named = fetch(open_store(run), "SELECT name FROM step_parts WHERE rank = ? ORDER BY name", [0])
    assert named["name"].tolist() == ["B", "F"]


def test_tables_without_files_are_empty_and_have_their_columns(run: str) -> None:
    write(run, "steps", 1, 2, loss=[float("nan")])
    store = open_store(run)
    for table, columns in TABLES.items():
        found = fetch(store, f"SELECT * FROM {table}")
        assert list(found) == [column.name for column in columns]
        assert {len(column) for column in found.values()} == {1 if table == "steps" else 0}
    assert np.isnan(fetch(store, "SELECT loss FROM steps")["loss"]).all()


def test_the_store_may_be_elsewhere(tmp_path: Path) -> None:
    write_rows(Location(f"{tmp_path}/stores/mine"), TableFile("steps", "n", 0, 1, 2), rows("steps", step=7))
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(f'name = "mine"\n[observe]\nstore_dir = "{tmp_path}/stores"\n')
    assert fetch(open_store(run), "SELECT step FROM steps")["step"].tolist() == [7]


def test_a_run_without_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such folder"):
        open_store(tmp_path / "nothing")
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank-00000.jsonl").touch()
    with pytest.raises(StoreError, match="no event store"):
        open_store(tmp_path)


@pytest.mark.parametrize("name", ["loop", "loop/mine", "n" * 300])
def test_a_folder_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StoreError, match=r"cannot be read: (Too many levels|File name too long)"):
        open_store(tmp_path / name)


@pytest.mark.parametrize(
    "sql",
    [
        "COPY (SELECT 1) TO '{folder}/x.csv'",
        "COPY (SELECT 1) TO '{folder}/events/steps/x.parquet' (FORMAT parquet)",
        "SELECT * FROM read_text('{folder}/secret')",
        "SELECT * FROM glob('{folder}/*')",
        "ATTACH '{folder}/x.db'",
        "SET enable_external_access = true",
        "SET allowed_paths = ['{folder}/secret']",
        "INSTALL httpfs",
        "INSERT INTO steps SELECT * FROM steps",
    ],
)
def test_a_query_reaches_no_other_file(sql: str, run: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    write(run, "steps", 1, 2)
    with pytest.raises(duckdb.Error):
        open_store(run).execute(sql.format(folder=run if "://" not in run and "secret" not in sql else tmp_path))
    assert not list(tmp_path.rglob("x.*"))


def test_only_the_tables_that_are_asked_for_are_opened(tmp_path: Path) -> None:
    """Files of a large job are many: a diagnosis needs those of two tables."""
    run = str(tmp_path)
    write(run, "states", 0, 9)
    (tmp_path / "events" / "steps").mkdir()
    (tmp_path / "events" / "steps" / "n.0.1-2.parquet").write_bytes(b"damaged")
    with open_store(run, tables=("states", "ranks")) as store:
        assert store.execute("SELECT (SELECT count(*) FROM states), (SELECT count(*) FROM ranks)").fetchall() == [
            (1, 0)
        ]
        with pytest.raises(duckdb.CatalogException, match="steps"):
            store.execute("FROM steps")


def test_rows_after_the_first_batch_are_damaged(tmp_path: Path) -> None:
    file = tmp_path / "numbers.parquet"
    pq.write_table(pa.table({"x": np.arange(3_000_000)}), file, row_group_size=100_000, use_dictionary=False)
    groups = pq.ParquetFile(file).metadata
    start = groups.row_group(groups.num_row_groups - 1).column(0).data_page_offset
    data = bytearray(file.read_bytes())
    data[start : start + 100] = bytes(100)
    file.write_bytes(data)
    with duckdb.connect() as connection, pytest.raises(StoreReadError, match="cannot be read"):
        fetch_coded(connection, f"SELECT * FROM '{file}'")


def test_a_file_that_is_replaced_while_the_store_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A live run has one file of states at a time, and the next one takes its place."""
    run, listed = str(tmp_path), query.list_files
    write(run, "states", 0, 9)

    def gone(store: Location, table: str) -> list[TableFile]:
        return [replace(file, node="gone") for file in listed(store, table)]

    def gone_at_first(store: Location, table: str) -> list[TableFile]:
        if table == list(TABLES)[-1]:
            monkeypatch.setattr(query, "list_files", listed)
        return gone(store, table)

    monkeypatch.setattr(query, "list_files", gone_at_first)
    assert open_store(run).execute("SELECT count(*) FROM states").fetchall() == [(1,)]
    monkeypatch.setattr(query, "list_files", gone)
    with pytest.raises(StoreError, match="No files found"):
        open_store(run)


@pytest.mark.parametrize(
    ("tags", "left_out"),
    [
        (["first step", "", "", "gc,checkpoint", "", "", "", ""], [0, 3]),
        (["first step", *["checkpoint"] * 5, "", "checkpoint,gc"], [0, 7]),
        (["first step"], [0]),
        (["", ""], []),
    ],
)
def test_steps_with_a_tag_that_is_rare_are_not_ordinary(tags: list[str], left_out: list[int], tmp_path: Path) -> None:
    """A save in every step tells no class of steps."""
    write(f"{tmp_path}", "steps", 1, 2, step=list(range(len(tags))), tags=tags)
    found = fetch(open_store(tmp_path), f"SELECT step FROM steps WHERE {has_rare_tag()} ORDER BY step")
    assert found["step"].tolist() == left_out
