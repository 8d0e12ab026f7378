"""Runner of the GPU suite: selected tests, output, results file; and a rehearsal on CPU processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import test_gpu  # noqa: E402
from test_gpu import Collector, Result, counts, figure, rows  # noqa: E402


def collected(gpus: int, *words: str) -> list[str]:
    """Collect the tests of a list without running."""
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


def test_a_line_shows_its_figures_and_the_end_of_its_reason() -> None:
    results = [
        Result("a", seconds=1.0, figures={"rate": {"value": 2.0, "unit": "GB/s", "least": None, "most": None}}),
        Result("b", "failed", 2.0, "line 1\nline 2\n\nline 3\nline 4"),
        Result("c", "skipped", 0.0, "needs 2 GPUs, this host has 1"),
    ]
    text = "\n".join(line for result in results for line in rows(result, 1))
    assert "PASSED  a" in text and "rate: 2 GB/s" in text
    assert "line 1" not in text and "line 4" in text
    assert "needs 2 GPUs, this host has 1" in text
    assert counts(results) == "1 passed, 1 failed, 1 skipped"


def report(name: str, when: str, outcome: str = "passed", **more: Any) -> Any:
    """Return pytest's report of a phase of a test."""
    truth = {each: each == outcome for each in ("passed", "failed", "skipped")}
    common = {"nodeid": f"tests/gpu/test_a.py::{name}", "when": when, "outcome": outcome, "duration": 0.5}
    return SimpleNamespace(**common, **truth, **{"user_properties": [], "longrepr": None, "longreprtext": ""} | more)


def run_tool(monkeypatch: pytest.MonkeyPatch, folder: Path, tests: Callable[[Collector], int], *words: str) -> int:
    """Run the tool with a fake pytest: `tests` returns pytest's status."""

    def instead(given: list[str], plugins: list[Collector]) -> int:
        (folder / "given.json").write_text(json.dumps(given))
        return tests(plugins[0])

    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv(test_gpu.REHEARSAL, raising=False)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(test_gpu, "ROOT", folder)
    monkeypatch.setattr(pytest, "main", instead)
    before = signal.getsignal(signal.SIGTERM)
    try:
        return test_gpu.main(words)
    finally:
        signal.signal(signal.SIGTERM, before)
        os.environ.pop(test_gpu.REHEARSAL, None)


def test_lines_and_file_grow_with_each_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "build" / "test-gpu-2.json"

    def tests(collector: Collector) -> int:
        capsys.readouterr()
        for count, name in enumerate(("one", "two"), 1):
            for when in ("setup", "call", "teardown"):
                collector.pytest_runtest_logreport(report(name, when))
            found = json.loads(path.read_text())
            assert [result["name"] for result in found["results"]] == ["test_a.py::one", "test_a.py::two"][:count]
            assert not found["complete"]
            assert capsys.readouterr().out == f"PASSED  test_a.py::{name}      1.5 s\n"
        return 0

    assert run_tool(monkeypatch, tmp_path, tests, "--gpus", "2") == 0
    assert json.loads(path.read_text())["complete"]


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_each_list_has_a_file_of_its_own(gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tests(collector: Collector) -> int:
        for when in ("setup", "call", "teardown"):
            collector.pytest_runtest_logreport(report("one", when, "failed" if when == "call" else "passed"))
        return 1

    for words in ([], ["--rehearse"]):
        assert run_tool(monkeypatch, tmp_path, tests, "--gpus", str(gpus), *words) == 1
    found = sorted(path.name for path in (tmp_path / "build").iterdir())
    assert found == [f"rehearsal-{gpus}.json", f"test-gpu-{gpus}.json"]


def test_without_a_gpu_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tests(collector: Collector) -> int:
        collector.pytest_runtest_logreport(report("one", "setup", "skipped", longrepr=("", 1, "Skipped: needs 1 GPU")))
        collector.pytest_runtest_logreport(report("one", "teardown"))
        return 0

    assert run_tool(monkeypatch, tmp_path, tests) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("torch finds no GPU: ") and "(torch 2." in line


def test_a_test_has_two_minutes_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, limited in ((["-k", "one"], True), (["--rehearse", "-k", "one"], False)):
        run_tool(monkeypatch, tmp_path, lambda _: 5, *words)
        given = json.loads((tmp_path / "given.json").read_text())
        assert given[-2:] == ["-k", "one"]
        assert ("timeout=120" in given) is limited


SLEEPING = """
import time
import pytest

@pytest.mark.gpu(1)
def test_quick():
    pass

@pytest.mark.gpu(1)
def test_slow():
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_terminated_run_leaves_the_table_so_far(tmp_path: Path) -> None:
    path, test = tmp_path / "out.json", tmp_path / "test_sleeping.py"
    test.write_text(SLEEPING)
    words = ["--rehearse", "--json", str(path), str(test), "-k", "test_quick or test_slow", "--ignore=tests/gpu"]
    tool = subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "test_gpu.py"), *words], stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 100
    while not path.exists():
        assert tool.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    tool.terminate()
    out, _ = tool.communicate(timeout=100)
    assert tool.returncode == 143
    assert "PASSED" in out and "1 passed, 0 failed, 0 skipped" in out
    found = json.loads(path.read_text())
    assert not found["complete"] and [result["outcome"] for result in found["results"]] == ["passed"]


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
