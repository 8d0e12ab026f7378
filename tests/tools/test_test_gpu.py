"""The runner of the GPU suite: which tests it keeps, what it prints and writes; and a rehearsal on CPU processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from test_gpu import Result, figure, table  # noqa: E402


def collected(gpus: int, *words: str) -> list[str]:
    """The tests of a list, by a dry collection."""
    command = [sys.executable, str(ROOT / "tools" / "test_gpu.py"), "--rehearse", "--gpus", str(gpus), "--json"]
    done = subprocess.run(
        [*command, "/dev/null", "--collect-only", *words], capture_output=True, text=True, check=False
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_each_list_has_its_own_tests() -> None:
    one, two, eight = (set(collected(gpus)) for gpus in (1, 2, 8))
    assert one and two and eight
    assert not (one & two or two & eight or one & eight)
    assert any("test_attention" in name for name in one)
    assert any("test_a_cold_start" in name for name in two)
    assert any("test_eight_stages" in name for name in eight)


def test_a_figure_says_what_is_expected_of_it() -> None:
    assert figure("step", 12.3456, "ms", None, None) == "step: 12.35 ms"
    assert figure("MFU", 52, "%", 50, None) == "MFU: 52 %  (expected at least 50)"
    assert figure("MFU", 42, "%", 50, None) == "MFU: 42 %  (expected at least 50: OUT OF RANGE)"
    assert figure("idle", 3, "%", None, 1.5) == "idle: 3 %  (expected at most 1.5: OUT OF RANGE)"


def test_the_table_counts_outcomes_and_shows_reasons() -> None:
    results = [
        Result("a", seconds=1.0, figures={"rate": {"value": 2.0, "unit": "GB/s", "least": None, "most": None}}),
        Result("b", "failed", 2.0, "line 1\nline 2\n\nline 3\nline 4"),
        Result("c", "skipped", 0.0, "needs 2 GPUs, this host has 1"),
    ]
    text = table(results)
    assert "PASSED  a" in text and "rate: 2 GB/s" in text
    assert "line 1" not in text and "line 4" in text
    assert "needs 2 GPUs, this host has 1" in text
    assert text.endswith("1 passed, 1 failed, 1 skipped")


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_rehearsal_runs_through(gpus: int, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "tools" / "test_gpu.py"), "--rehearse", "--gpus", str(gpus)]
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, check=False, timeout=590)
    assert done.returncode == 0, done.stdout
    found = json.loads(path.read_text())
    outcomes = [result["outcome"] for result in found["results"]]
    assert found["rehearsal"] and found["machine"]["torch"]
    assert "failed" not in outcomes and outcomes.count("passed") > 10
    assert all(r["reason"] == "only a GPU can show it" for r in found["results"] if r["outcome"] == "skipped")
