"""Grafana dashboards: the committed files are those that the tool writes, and their queries name exported metrics."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.operate.store.every_metric import every_name

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import grafana  # noqa: E402

FILES = sorted(grafana.FOLDER.glob("*.json"))


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def test_the_files_are_what_the_tool_writes() -> None:
    assert {path.name: path.read_text() for path in FILES} == {
        f"{board.uid}.json": grafana.text_of(board) for board in grafana.BOARDS
    }, "run tools/grafana.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dashboard_is_complete(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    board = json.loads(text)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert {variable["name"] for variable in board["templating"]["list"]} >= {"datasource", "run"}
    for panel in panels(board):
        assert panel["title"]
        assert panel["datasource"]["uid"] == "$datasource"
        for target in panel["targets"]:
            assert 'run="$run"' in target["expr"], target
    titles = [panel["title"] for panel in panels(board)]
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert len(set(rows)) == len(rows)
    assert titles
    names = set(re.findall(r"\bmegascale_\w+", text))
    assert names - every_name(tmp_path) == set()


def test_all_metrics_of_hosts_and_jobs_are_on_a_dashboard(tmp_path: Path) -> None:
    shown = {name for path in FILES for name in re.findall(r"\bmegascale_\w+", path.read_text())}
    left_out = {
        "megascale_world_size", "megascale_gpu_last_xid", "megascale_gpu_lost", "megascale_gpu_throttle_reasons",
        "megascale_host_clock_max_error_seconds", "megascale_host_clock_synchronized", "megascale_infiniband_link_up",
        "megascale_infiniband_link_recoveries_total", "megascale_infiniband_symbol_errors_total",
        "megascale_skipped_steps_total",
    }  # fmt: skip
    assert every_name(tmp_path) - shown == left_out
