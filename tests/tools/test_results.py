"""Pages of results say how they were measured, and are written by what measured them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import page_tables
import results
import status

ROOT = Path(__file__).parents[2]
TABLE = "| x | y |\n|---|---|\n| 1 | 2 |"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["results.py", *words])
    return results.main()


def test_a_page_says_how_it_was_measured(folder: Path) -> None:
    page = results.write_page("speed", "Speed", "Steps are timed.", [f"{TABLE}\n", "A sentence."], ["make a", "make b"])
    assert results.read_heading(page) == results.Heading("Speed", "Steps are timed.", ("make a", "make b"))
    assert page.read_text().endswith(f"\n\n{TABLE}\n\nA sentence.\n")
    assert re.search(r"^\| commit \| ([0-9a-f]{8}( with changes)?|release \S+) \|$", page.read_text(), re.MULTILINE)


def test_a_command_s_table_becomes_a_page_and_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table.md").write_text(f"{TABLE}\n")
    command = ["cat", str(tmp_path / "table.md")]
    assert run(monkeypatch, "speed", "--title", "Speed", "--measured", "Steps are timed.", "--", *command) == 0
    first = (folder / "speed.md").read_text()
    assert first.endswith(f"\n\n{TABLE}\n")
    (folder / "speed.md").write_text(first.replace("| 1 | 2 |", "| 3 | 4 |").replace("-28 |", "-01 |"))
    assert run(monkeypatch, "speed") == 0
    assert (folder / "speed.md").read_text() == first


def test_output_without_a_table_is_a_block(folder: Path) -> None:
    assert results.output("echo some words") == "```\nsome words\n```"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["speed"], "No such file"),
        (["unknown"], "the page names no command"),
        (["speed", "--", "true"], "needs --title and --measured"),
        (["speed", "--title", "T", "--measured", "S.", "--", "false"], "non-zero exit status 1"),
    ],
)
def test_mistakes(
    words: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = results.write_page("unknown", "Speed", "Steps are timed.", [TABLE], ["x"])
    page.write_text(page.read_text().replace("`x`", "not recorded"))
    assert run(monkeypatch, *words) == 2
    assert message in capsys.readouterr().err
    assert [*folder.iterdir()] == [page]


@pytest.mark.parametrize("row", results.ROWS)
def test_a_page_without_a_row_is_found(row: str, folder: Path) -> None:
    page = results.write_page("speed", "Speed", "Steps are timed.", [TABLE], ["make a"])
    page.write_text(re.sub(rf"^\| {row} \|.*$", f"| {row} | |", page.read_text(), flags=re.MULTILINE))
    with pytest.raises(ValueError, match=f"no {row} in its first table"):
        results.read_heading(page)


def test_only_what_stands_between_the_markers_is_replaced(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for check in (results.check_region, lambda page, name: results.fill(page, name, "table")):
        with pytest.raises(ValueError, match="add both lines where the table should be"):
            check(page, "peers")
    page.write_text("before\n<!-- peers: begin -->\nold\n<!-- peers: end -->\nafter\n| date | 2026-01-01 |\n")
    for content in ("new", "newer"):
        results.fill(page, "peers", content)
        assert page.read_text() == (
            f"before\n<!-- peers: begin -->\n{content}\n<!-- peers: end -->\nafter\n| date | 2026-01-01 |\n"
        )


def test_a_filled_page_of_results_has_the_date_of_now(folder: Path) -> None:
    region = "<!-- peers: begin -->\nold\n<!-- peers: end -->"
    page = results.write_page("peers", "Peers", "Steps are timed.", [region], ["make a"])
    now = page.read_text()
    page.write_text(re.sub(r"\| date \| .* \|", "| date | 2026-01-01 |", now))
    results.fill(page, "peers", "new")
    assert page.read_text() == now.replace("old", "new")


def test_generated_tables_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["page_tables.py", "--check"])
    assert page_tables.main() == 0


def test_a_page_that_is_out_of_date_is_status_1_and_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "a.md"
    page.write_text("before\n<!-- rows: begin -->\nold\n<!-- rows: end -->\nafter\n")
    monkeypatch.setattr(page_tables, "DOCS", tmp_path)
    monkeypatch.setattr(page_tables, "TABLES", {("a.md", "rows"): lambda: ["new"]})
    monkeypatch.setattr(sys, "argv", ["page_tables.py", "--check"])
    assert page_tables.main() == 1 and "old" in page.read_text()
    assert capsys.readouterr().err == "out of date: a.md  -> make docs\n"
    monkeypatch.setattr(sys, "argv", ["page_tables.py"])
    assert page_tables.main() == 0
    assert page.read_text() == "before\n<!-- rows: begin -->\nnew\n<!-- rows: end -->\nafter\n"


def test_a_rule_s_state_is_that_of_its_defaults() -> None:
    rows = {row.split(" | ")[0]: row.split(" | ")[3] for row in page_tables.rules()}
    assert (rows["| `muon`"], rows["| `adamw_8bit`"], rows["| `galore`"]) == ("mn", "0.51 mn", "2 rl + rs")


def test_the_gpu_suite_s_file_becomes_a_page(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        ("test_speed.py::test_a[x]", "passed"),
        ("test_speed.py::test_a[y]", "failed"),
        ("test_speed.py::test_b", "skipped"),
    ]
    found = [{"name": name, "outcome": outcome} for name, outcome in cases]
    file = tmp_path / "test-gpu-1.json"
    file.write_text(json.dumps({"gpus": 1, "machine": {"device": "NVIDIA H200"}, "results": found}))
    page = status.write_suite(file)
    assert "| `tests/gpu/test_speed.py::test_a` | 2 | 1 | 1 | 0 |" in page.read_text()
    monkeypatch.setattr(status, "SUITE", page)
    assert status.suite_outcomes() == {"tests/gpu/test_speed.py": (1, 3)}
