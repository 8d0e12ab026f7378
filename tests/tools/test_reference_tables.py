"""The generated tables of hand-written pages are what the tool writes, and leave nothing out."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from megascale.operate.store.schema import TABLES as STORE_TABLES
from megascale.record import metrics
from tools import reference_tables
from tools.reference_tables import MARKED, ROOT, TABLES, main, pages, tables_of

MARKER = re.compile(r"<!-- [\w-]+: (?:begin|end) -->")


def test_the_pages_are_current(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["reference_tables.py", "--check"])
    assert main() == 0, capsys.readouterr().err


def test_each_table_stands_on_one_page() -> None:
    shown = [name for page in pages() for name in tables_of(page.read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted(TABLES)


def test_no_marker_is_left_open() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert len(MARKER.findall(text)) == 2 * len(MARKED.findall(text)), page


def test_a_page_out_of_date_is_status_1_and_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference_tables, "ROOT", tmp_path)
    monkeypatch.setattr(reference_tables, "TABLES", {"numbers": lambda: "| 1 |"})
    page, text = tmp_path / "docs" / "page.md", "# Page\n\n<!-- numbers: begin -->\n| 0 |\n<!-- numbers: end -->\n\nMore.\n"
    page.parent.mkdir()
    page.write_text(text)
    monkeypatch.setattr(sys, "argv", ["reference_tables.py", "--check"])
    assert main() == 1
    assert (page.read_text(), capsys.readouterr().err) == (text, "docs/page.md is out of date  -> make docs\n")
    monkeypatch.setattr(sys, "argv", ["reference_tables.py"])
    assert main() == 0
    assert page.read_text() == text.replace("0", "1")


def test_every_key_of_a_record_has_a_meaning() -> None:
    nodes = ast.parse((ROOT / "megascale/record/metrics.py").read_text(encoding="utf-8")).body
    records = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    assert records.keys() == reference_tables.RECORDS.keys()
    for name, node in records.items():
        described = dict(reference_tables.fields(node))
        assert list(described) == [field.name for field in fields(getattr(metrics, name))]
        assert all(described.values())


def test_every_column_and_metric_is_there() -> None:
    store, series = TABLES["event-store"](), TABLES["prometheus-metrics"]()
    assert all(f"`{column.name}`" in store for columns in STORE_TABLES.values() for column in columns)
    assert "| `megascale_rank_info` | gauge | rank, tp, cp, dp, pp | " in series
    assert "| `megascale_gpu_xid_errors_total` | counter | gpu | " in series
