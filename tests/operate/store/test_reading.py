"""Reading of a store whose files are merged meanwhile, or damaged."""

from __future__ import annotations

import errno
from pathlib import Path

import duckdb
import pytest

from megascale.core.storage import Location
from megascale.operate.store import reading
from megascale.operate.store.query import StoreError, answer, fetch
from megascale.operate.store.reading import read_store
from megascale.operate.store.table_files import TableFile, write_rows
from tests.operate.store.tables import rows

SQL = "SELECT step, loss FROM steps ORDER BY step"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three files of steps, of 40 rows each."""
    found = []
    for number in range(3):
        file = TableFile("steps", "n", 0, 10 * number, 10 * number + 10)
        step = [40 * number + index + 1 for index in range(40)]
        write_rows(Location(f"{tmp_path}/events"), file, rows("steps", 40, step=step, loss=[1 / n for n in step]))
        found.append(tmp_path / "events" / file.path)
    return found


def steps_of(store: duckdb.DuckDBPyConnection) -> list[int]:
    return list(fetch(store, SQL)["step"].tolist())


def test_a_file_that_is_merged_while_it_is_read(tmp_path: Path, files: list[Path]) -> None:
    calls: list[object] = []

    def read(store: duckdb.DuckDBPyConnection) -> list[int]:
        if not calls:  # the node merges, and removes the parts at its next write
            merged = TableFile("steps", "n", 0, 0, 30)
            write_rows(Location(f"{tmp_path}/events"), merged, rows("steps", 120, step=list(range(1, 121))))
            for file in files:
                file.unlink()
        calls.append(store)
        return steps_of(store)

    found = read_store(tmp_path, read)
    assert (found.value, found.notes, len(calls)) == (list(range(1, 121)), (), 2)


def test_a_raw_query_that_fails_is_read_again_as_well(tmp_path: Path, files: list[Path]) -> None:
    def read(store: duckdb.DuckDBPyConnection) -> list[tuple]:
        files[0].unlink(missing_ok=True)
        return store.execute("SELECT count(*) FROM steps WHERE loss > 0").fetchall()

    assert read_store(tmp_path, read).value == [(80,)]


@pytest.mark.parametrize("which", [0, 2], ids=["first", "last"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "unnamed"])
def test_a_damaged_file_is_left_out_and_told(tmp_path: Path, files: list[Path], damage: str, which: int) -> None:
    data = files[which].read_bytes()
    flipped = data[:10] + bytes(byte ^ 255 for byte in data[10:-200]) + data[-200:]
    unnamed = data.replace(b"loss", b"\xffoss")
    contents = {"truncated": data[: len(data) // 2], "empty": b"", "flipped": flipped, "unnamed": unnamed}
    files[which].write_bytes(contents[damage])
    found = read_store(tmp_path, steps_of)
    assert found.value == (list(range(41, 121)) if which == 0 else list(range(1, 81)))
    assert found.notes == (f"{files[which]} is damaged; its rows are missing; remove it",)
    assert found.damaged == (str(files[which]),)


def test_a_file_that_may_not_be_read(tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    data, read = files[1].read_bytes(), Location.read
    files[1].write_bytes(b"")  # for DuckDB: this process may read everything

    def refuse(self: Location) -> bytes:
        if str(self) == str(files[1]):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return read(self)

    monkeypatch.setattr(Location, "read", refuse)
    (note,) = read_store(tmp_path, steps_of).notes
    assert note == f"{files[1]} cannot be read: Permission denied; its rows are missing; check its permissions"
    files[1].write_bytes(data)
    assert not read_store(tmp_path, steps_of).notes


def test_a_store_elsewhere_with_a_damaged_file(tmp_path: Path) -> None:
    run = f"memory://{tmp_path.name}"
    for number in range(2):
        write_rows(
            Location(f"{run}/events"), TableFile("steps", "n", 0, number, number + 1), rows("steps", step=number)
        )
    damaged = Location(f"{run}/events") / TableFile("steps", "n", 0, 0, 1).path
    damaged.write(damaged.read()[:50])
    found = read_store(run, steps_of)
    assert (found.value, found.damaged) == ([1], (str(damaged),))


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read to find damaged ones."""
    found: list[str] = []
    damage = reading._damage

    def look(file: Location) -> str:
        found.append(str(file))
        return damage(file)

    monkeypatch.setattr(reading, "_damage", look)
    return found


MISTAKES = {
    "SELECT 'a'::INTEGER + step FROM steps": "Conversion Error",
    "SELECT (step + 100)::TINYINT + 127::TINYINT FROM steps": "Conversion Error",
    "SELECT step * 9223372036854775807 FROM steps": "Out of Range Error",
    "SELECT error('x') FROM steps": "Invalid Input Error: x",
    "SELECT (SELECT step FROM steps)": "Invalid Input Error: More than one row",
    "SELECT FROM WHERE": "Parser Error",
    "SELECT * FROM read_text('/etc/passwd')": "Permission Error",
}


@pytest.mark.parametrize(("sql", "told"), MISTAKES.items())
def test_a_mistake_in_a_query_is_told_after_one_reading(
    tmp_path: Path, files: list[Path], searches: list[str], sql: str, told: str
) -> None:
    calls: list[object] = []

    def read(store: duckdb.DuckDBPyConnection) -> object:
        calls.append(store)
        return answer(store, sql)

    with pytest.raises(StoreError, match=f"the query failed: {told}"):
        read_store(tmp_path, read)
    assert (len(calls), searches) == (1, [])


def test_files_that_go_in_several_readings_begin_no_search(
    tmp_path: Path, files: list[Path], searches: list[str]
) -> None:
    going = iter(files[:2])

    def read(store: duckdb.DuckDBPyConnection) -> list[int]:
        if file := next(going, None):
            file.unlink()
        return steps_of(store)

    assert read_store(tmp_path, read).value == list(range(81, 121))
    assert not searches


def test_damaged_files_are_searched_among_those_that_are_read(
    tmp_path: Path, files: list[Path], searches: list[str]
) -> None:
    for file in (files[0], files[2]):
        file.write_bytes(file.read_bytes()[:50])
    found = read_store(tmp_path, steps_of, last_s=0.01)
    assert (found.value, found.damaged) == (list(range(41, 81)), (str(files[2]),))
    assert set(searches) == {str(files[1]), str(files[2])}
    searches.clear()
    with pytest.raises(StoreError, match="cannot be read"):
        read_store(tmp_path, steps_of, search=False)
    assert not searches


def test_what_no_reading_helps_is_raised(tmp_path: Path, files: list[Path]) -> None:
    with pytest.raises(StoreError, match="the event store cannot be read: Permission Error"):
        read_store(tmp_path, lambda store: fetch(store, "SELECT * FROM read_text('/etc/passwd')"))
