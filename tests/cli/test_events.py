"""`megascale events` as a user meets it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from megascale.cli.main import main
from megascale.core.storage import Location
from megascale.operate.store.query import open_store
from megascale.operate.store.ready_queries import READY_QUERIES
from megascale.operate.store.schema import TABLES, schema_page
from megascale.operate.store.table_files import TableFile, write_rows
from tests.operate.store.tables import rows

MS = 1_000_000
SLOW, STEPS = 2, 30


KINDS = (
    ("compute", "F", 0, 50, 0), ("dp", "reduce_scatter", 80, 20, 1 << 20), ("host", "data", 2, 2, 0),
    ("step", "step", 400, 0, 0),
)  # fmt: skip
"""Parts of a step: axis, name, ms in total and exposed, bytes. F also computes for `own_ms`."""


def own_ms(rank: int) -> float:
    """The time of a rank's compute: stage 1 has twice the work, and a rank is a tenth slower."""
    return (200 if rank % 2 else 100) * (1.1 if rank == SLOW else 1.0)


def rank_tables(rank: int) -> dict[str, dict[str, list[Any]]]:
    """The tables of a rank. A collection takes step 7, and rank 1 loses events of step 9."""
    parts = [(step, *kind) for step in range(1, STEPS + 1) for kind in KINDS] + [(7, "host", "gc", 300, 300, 0)]
    step, axis, name, total, exposed, size = (list(column) for column in zip(*parts, strict=True))
    total_ns = [round((ms or own_ms(rank) + waited) * MS) for ms, waited in zip(total, exposed, strict=True)]
    steps = list(range(1, STEPS + 1))
    issued = [(one * 1000 + 3 * rank) * MS for one in step]
    return {
        "step_parts": rows(
            "step_parts", len(parts), rank=rank, step=step, axis=axis, name=name, count=1, bytes=size,
            total_ns=total_ns, max_ns=total_ns, exposed_ns=[ms * MS for ms in exposed], last_issue_ns=issued,
        ),
        "steps": rows(
            "steps", STEPS, rank=rank, step=steps, start_ns=[n * 1000 * MS for n in steps], train_ns=400 * MS,
            end_ns=[(n * 1000 + (990 if n == 7 else 400)) * MS for n in steps], tokens=4096, flops=1e12,
            tags=["first step" if n == 1 else "gc" if n == 7 else "" for n in steps],
            peak_memory_bytes=(rank + 1) << 30,
            events_lost=[17 if (n, rank) == (9, 1) else 0 for n in steps],
        ),
        "ranks": rows("ranks", rank=rank, world=4, node=f"node-{rank}", pp=rank % 2, dp=rank // 2, peak_flops=1e13),
        "events": rows("events", 2, rank=rank, step=3, axis=["tp", "compute"], name=["all_gather", "B"],
                       end_ns=[5 * MS, (rank + 1) * 7 * MS]),
    }  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks in two stages, on four nodes."""
    folder = tmp_path_factory.mktemp("run")
    tables = [(f"node-{rank}", table, columns) for rank in range(4) for table, columns in rank_tables(rank).items()]
    load = {"node": "node-0", "metric": "cpu.load", "time_ns": [1, 2], "value": [9.0, 0.5]}
    record = {"phase": "step", "step": 30, "read_ns": 5 * 10**9, "updated_ns": 10**9, "wait": ["waiting", "dp", 41, 3]}
    tables.append(("node-0", "host_metrics", rows("host_metrics", 2, **load)))
    start = {"axis": "host", "name": "start: import", "rank": [0, 3], "start_ns": [0, 0], "end_ns": [10**9, 3 * 10**9]}
    tables.append(("node-4", "events", rows("events", 2, step=0, **start)))
    tables.append(("node-3", "states", rows("states", rank=3, record=json.dumps(record))))
    for node, table, columns in tables:
        write_rows(Location(str(folder / "events")), TableFile(table, node, 0, 1, 2), columns)
    return folder


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict]:
    assert main(["events", *map(str, words), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["events", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "  -> " in err
    return err


def test_a_query_prints_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", str(run), "SELECT rank, node, NULL AS no, 0.5 AS x FROM ranks ORDER BY rank LIMIT 2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rank  node    no    x",
        "   0  node-0      0.5",
        "   1  node-1      0.5",
    ]
    assert main(["events", str(run), "SELECT rank FROM ranks WHERE rank > 9"]) == 0
    assert capsys.readouterr().out.splitlines() == ["rank", "no rows"]


def test_options_may_stand_between_run_and_query(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT count(*) AS n FROM ranks"
    for words in (
        ("--json", str(run), sql), (str(run), "--json", sql), (str(run), sql, "--json"),
        (str(run), "--last", "60", sql, "--json"),
    ):  # fmt: skip
        assert main(["events", *words]) == 0, words
        assert json.loads(capsys.readouterr().out)["rows"] == [[4]]
    for words in ((str(run), "--json", sql, "more"), (str(run), sql, "--last", "-5"), (str(run), "--jsno", sql)):
        with pytest.raises(SystemExit) as ended:
            main(["events", *words])
        assert ended.value.code == 2, words


def test_csv_and_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = (
        "SELECT rank, 'nan'::DOUBLE AS x, sum(world)::HUGEINT AS n, [1, 2] AS l FROM ranks GROUP BY rank ORDER BY rank"
    )
    assert main(["events", str(run), sql, "--csv"]) == 0
    lines = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert lines[:2] == [["rank", "x", "n", "l"], ["0", "nan", "4", "[1, 2]"]] and len(lines) == 5
    assert answer(capsys, run, sql)[0] == {"rank": 0, "x": None, "n": 4, "l": [1, 2]}


def test_the_slowest_rank_is_compared_with_its_stage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *rest = answer(capsys, run, "slowest-ranks")
    assert (first["rank"], first["own_ms"], first["steps"]) == (SLOW, 110.0, STEPS - 2)
    assert first["of_median"] == pytest.approx(110 / 105, abs=1e-3)
    assert [row["of_median"] for row in rest if row["stage"] == 1] == [1.0, 1.0]


def test_communication_by_axis(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, run, "exposed") == [
        {"axis": "dp", "name": "reduce_scatter", "calls": 1.0, "bytes": 1 << 20, "ms": 80.0, "exposed_ms": 20.0,
         "share": 0.05},
    ]  # fmt: skip


def test_step_time_and_mfu_of_ordinary_steps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, run, "step-time")
    assert (found[0]["first"], found[-1]["last"], len(found)) == (2, STEPS, 20)
    assert {(row["median_ms"], row["max_ms"], row["mfu_full"], row["tokens_per_s"]) for row in found} == {
        (400.0, 400.0, 0.0625, 10240.0)
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tagged-steps", {"step": 7, "tags": "gc", "ranks": 4, "train_ms": 400.0, "more_ms": 590.0}),
        ("gc", {"rank": 0, "collections": 1, "ms": 300.0, "longest_ms": 300.0}),
        ("data-stalls", {"waited_ms": 2.0, "share": 0.005}),
        ("entry-spread", {"step": STEPS, "widest_ms": 6.0, "median_ms": 6.0}),
        ("longest-events", {"rank": 3, "name": "B", "ms": 28.0}),
        ("start", {"attempt": 0, "part": "import", "median_s": 2.0, "slowest_s": 3.0, "slowest_rank": 3}),
        ("memory", {"rank": 3, "peak_gib": 4.0}),
        ("hosts", {"node": "node-0", "load": 0.5, "cpu_percent": None}),
        ("states", {"rank": 3, "phase": "step", "wait": "waiting", "wait_group": "dp", "sequence": 41, "idle_s": 4.0}),
        ("lost-events", {"rank": 1, "lost": 17, "steps": 1}),
    ],
)
def test_ready_queries(run: Path, capsys: pytest.CaptureFixture[str], name: str, expected: dict) -> None:
    found = answer(capsys, run, name)
    row = next(row for row in found if name != "tagged-steps" or row["step"] == 7)
    assert row | expected == row


def test_the_entry_spread_of_the_last_attempt_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gradients are reduced over cp, too: here the group are two cp ranks."""
    for attempt, steps in ((0, range(1, 41)), (1, range(11, 15))):
        step, rank = [one for one in steps for _ in "ab"], [0, 1] * len(steps)
        issued = [one * 1000 * MS + 5 * MS * late for one, late in zip(step, rank, strict=True)]
        parts = {"attempt": attempt, "rank": rank, "step": step, "axis": "dp", "name": "all_reduce"}
        tables = {
            "step_parts": rows("step_parts", len(step), **parts, last_issue_ns=issued),
            "ranks": rows("ranks", 2, attempt=attempt, rank=[0, 1], world=2, cp=[0, 1]),
        }
        for table, columns in tables.items():
            write_rows(Location(str(tmp_path / "events")), TableFile(table, "n", attempt, 1, 2), columns)
    found = answer(capsys, tmp_path, "entry-spread")
    assert [(row["attempt"], row["step"]) for row in found[:5]] == [(1, 14), (1, 13), (1, 12), (1, 11), (0, 40)]
    assert {(row["widest_ms"], row["last_rank"]) for row in found} == {(5.0, 1)}


def test_the_mfu_of_a_job_that_shrank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for attempt, world, steps in ((0, 4, range(1, 52)), (1, 2, range(52, 104))):  # a twentieth has steps of both
        tables = {
            "steps": rows("steps", len(steps), attempt=attempt, step=list(steps), start_ns=list(steps),
                          train_ns=1000 * MS, flops=world * 1e12),
            "ranks": rows("ranks", world, attempt=attempt, rank=list(range(world)), world=world, peak_flops=4e12),
        }  # fmt: skip
        for table, columns in tables.items():
            write_rows(Location(str(tmp_path / "events")), TableFile(table, "n", attempt, 1, 2), columns)
    found = answer(capsys, tmp_path, "step-time")
    assert {row["mfu_full"] for row in found} == {0.25}
    assert [row["attempt"] for row in found] == [0] * 10 + [1] * 11
    assert [row["last"] for row in found if row["attempt"] == 0][-1] == 51


@pytest.mark.parametrize("name", READY_QUERIES)
def test_ready_queries_run_on_an_empty_store(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Location(str(tmp_path / "events")), TableFile("states", "n", 0, 1, 2), rows("states", record="{}"))
    assert main(["events", str(tmp_path), name]) == 0
    capsys.readouterr()


def test_the_list_and_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(READY_QUERIES) and len(lines) >= 10
    assert main(["events", "--schema"]) == 0
    assert capsys.readouterr().out == schema_page() + "\n"
    assert all(f"`{column.name}`" in schema_page() for columns in TABLES.values() for column in columns)


def test_only_the_newest_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Location(str(tmp_path / "events"))
    for step, end_ms in ((1, 10_000), (2, 20_000), (3, 30_000)):
        write_rows(store, TableFile("steps", "n", 0, end_ms - 10_000, end_ms), rows("steps", step=step))
    write_rows(store, TableFile("ranks", "n", 0, 0, 1), rows("ranks", rank=5))
    sql = "SELECT step, ranks.rank FROM steps, ranks ORDER BY step"
    assert [row["step"] for row in answer(capsys, tmp_path, sql, "--last", 12)] == [2, 3]
    assert [row["step"] for row in answer(capsys, tmp_path, sql)] == [1, 2, 3]


def test_mistakes_have_one_clear_message(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such folder" in refusal(capsys, tmp_path / "nowhere", "gc")
    assert "no event store" in refusal(capsys, tmp_path, "gc")
    assert "did you mean slowest-ranks?" in refusal(capsys, run, "slowest-rank")
    assert "tables: events, step_parts" in refusal(capsys, run, "SELECT * FROM event")
    assert "syntax error" in refusal(capsys, run, "SELECT FROM WHERE")
    assert 'column "ranc"' in refusal(capsys, run, "SELECT ranc FROM ranks").lower()
    assert "QUERY is missing" in refusal(capsys, run)


@pytest.mark.parametrize(
    "sql",
    [
        "DROP VIEW steps",
        "COPY steps TO '/tmp/x.csv'",
        "SELECT 1; SELECT 2",
        "SET threads = 1",
        "CREATE TABLE x AS SELECT 1",
        "EXPLAIN ANALYZE COPY steps TO '/tmp/x.csv'",
    ],
)
def test_a_query_is_a_single_select(run: Path, capsys: pytest.CaptureFixture[str], sql: str) -> None:
    assert "the query is not a single SELECT" in refusal(capsys, run, sql)
    assert not Path("/tmp/x.csv").exists()


def test_a_query_may_describe_and_summarize(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, run, "DESCRIBE steps")[0]["column_name"] == "attempt"
    assert len(answer(capsys, run, "SHOW TABLES")) == len(TABLES)
    assert open_store(run).execute("SELECT count(*) FROM steps").fetchall() == [(4 * STEPS,)]
