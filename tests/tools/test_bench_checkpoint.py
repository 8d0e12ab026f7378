"""Checkpoint benchmark: a run on a tiny model, and tables and verdicts from given measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "tools" / "bench"
sys.path.insert(0, str(BENCH))  # the tool's files stand beside each other

import checkpoint as tool  # noqa: E402
from peer_systems import Layout, Size  # noqa: E402

TINY = Size(hidden=32, layers=2, heads=2, ffn=48, seq=16, vocab=128, micro_batch=1, global_batch=2).arguments()


@pytest.mark.slow
def test_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, results = tmp_path / "here", tmp_path / "results.json"
    words = ["--layouts", "tp2", "--saves", "1", "--folder", str(folder), "--output", str(results), *TINY]
    assert tool.main(words) == 0, capsys.readouterr().err
    assert not list(folder.iterdir()), "something stays in the folder"
    found = json.loads(results.read_text())["layouts"]["tp2"]
    seconds = found["seconds"]
    parts = {"stall", "written", "blocking", "step"}
    assert {"copy", "step", "resume"} < set(seconds)
    assert {f"{system} {part}" for system in ("megascale", "torch dcp") for part in parts} < set(seconds)
    assert all(value > 0 for values in seconds.values() for value in values)
    assert len(seconds["copy"]) == len(seconds["megascale stall"]) == len(seconds["torch dcp stall"]) == 1
    elsewhere = found["elsewhere"]
    assert elsewhere["layout"] == "1" and set(elsewhere["seconds"]) == {"resume"}
    model = 12 * (2 * (4 * 32 * 32 + 3 * 32 * 48) + 2 * 128 * 32 + 5 * 32)  # bytes: matrices and norms, with AdamW
    assert elsewhere["read"] == model < elsewhere["one copy"] == found["one copy"]  # a file has its header too
    assert model <= sum(found["state"]) and model <= found["read"]  # the ranks of tp2 have the same norms
    shown = capsys.readouterr().out
    assert shown.count("| tp2 | megascale |") == shown.count("| tp2 | torch dcp |") == 1
    assert "| tp2 | tp2 |" in shown and "| tp2 | 1 |" in shown


def test_the_tables() -> None:
    ours = {"stall": [0.3, 0.2], "check": [0.1, 0.1], "begin": [0.3, 0.2], "complete": [0.1, 0.3],
            "blocking": [2.5, 2.5], "written": [3, 3], "step": [1.5, 1.5, 1.5]}  # fmt: skip
    peer = {"stall": [1, 1], "blocking": [2, 2], "written": [4, 4], "step": [2, 2]}
    seconds = {"copy": [0.2, 0.2], "step": [1.0], "resume": [1.0]}
    seconds |= {f"megascale {name}": values for name, values in ours.items()}
    seconds |= {f"torch dcp {name}": values for name, values in peer.items()}
    elsewhere = {"layout": "1", "seconds": {"resume": [2, 4]}, "read": 3 << 20, "one copy": 2 << 20}
    record = {"seconds": seconds, "state": [1 << 20, 2 << 20], "read": 2 << 20, "one copy": 2 << 20}
    layouts = {"tp2": record | {"elsewhere": elsewhere}}
    lines = tool.saves_table(layouts).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    ours_row, peer_row = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:])
    assert ours_row[:7] == [
        "tp2", "megascale", "2", "0.200 (0.200..0.200)", "0.250 (0.225..0.275)", "1.25", "0.550 (0.525..0.575)",
    ]  # fmt: skip
    assert (ours_row[8], ours_row[-1], peer_row[5], peer_row[8], peer_row[-1]) == (
        "0.100", "1.50", "5.00", "0.500", "2.00",
    )  # fmt: skip
    assert tool.loads_table(layouts).splitlines()[2:] == [
        "| tp2 | tp2 | 1.000 (1.000..1.000) | 2.0 | 2.0 | 1.000 |",
        "| tp2 | 1 | 3.000 (2.500..3.500) | 3.0 | 2.0 | 1.500 |",
    ]


def test_every_layout_has_another_that_resumes_from_it() -> None:
    layouts = [Layout.parse(name) for name in tool.LAYOUTS.split(",")]
    assert [tool.partner(layout, layouts).name for layout in layouts] == ["tp2", "dp2", "tp2 pp2", "1"]
    assert [tool.partner(layout, [layout]).name for layout in layouts] == ["tp2", "1", "1", "1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--saves 0", "--saves: give at least one"),
        ("--layouts 1,3", "'3' is not a layout"),
        ("--layouts 1,tp3", "layout tp3  parallel.tp: 8 heads cannot be split over tp = 3"),
    ],
)
def test_mistakes_cost_no_measurement(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "measure", None)
    assert tool.main(words.split()) == 2
    assert message in capsys.readouterr().err
