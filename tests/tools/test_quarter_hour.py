"""The script for one GPU: its order, what a second call skips, its limits; and the table of results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quarter_hour

ROOT = Path(__file__).parents[2]

PYTHON = f"""#!/bin/bash
if [[ $1 == tools/quarter_hour.py ]]; then shift; exec {sys.executable} {ROOT}/tools/quarter_hour.py "$@"; fi
if [[ $1 == -c ]]; then echo "$GPUS"; exit; fi
echo "${{LD_PRELOAD:+preloaded }}${{NCCL_MULTI_RANK_GPU_ENABLE:+shared }}$*" >>calls
[[ $* != *"$FAILS"* ]] || {{ echo broken >&2; exit 3; }}
echo progress; echo '{{"figures": {{"a figure": "12 ms"}}}}'
"""
"""Stands for every tool of the script; it fails where its arguments contain $FAILS."""

TIMEOUT = """#!/bin/bash
shift 2; echo "$1" >>limits; shift; exec "$@"
"""


def with_script(folder: Path) -> Path:
    """Write into a folder the script, and programs in place of Python and of `timeout`."""
    (folder / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "gpu_quarter_hour.sh", folder / "tools")
    for name, text in (("python3", PYTHON), ("timeout", TIMEOUT)):
        (folder / "bin").mkdir(exist_ok=True)
        program = folder / "bin" / name
        program.write_text(text)
        program.chmod(0o755)
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return with_script(tmp_path)


def call(here: Path, *words: str, fails: str = "nothing", gpus: int = 1, rehearse: bool = False) -> list[str]:
    """Run the script, which must fail if a part fails; return the calls of tools."""
    env = os.environ | {"PATH": f"{here / 'bin'}:{os.environ['PATH']}", "FAILS": fails, "GPUS": str(gpus)}
    env["REHEARSE"] = "1" if rehearse else ""
    (here / "calls").unlink(missing_ok=True)
    done = subprocess.run([here / "tools" / "gpu_quarter_hour.sh", *words], env=env, check=False, capture_output=True)
    calls = (here / "calls").read_text().splitlines() if (here / "calls").exists() else []
    assert done.returncode == any(fails in words for words in calls), done.stderr
    return calls


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The calls of tools on one GPU."""
    return call(with_script(tmp_path_factory.mktemp("whole")), "10000")


def test_a_second_call_runs_what_failed(here: Path) -> None:
    first = call(here, "10000", fails="recipe=rowwise")
    assert "doctor" in first[0] and "device-waits" in first[1] and len(first) == 20
    (again,) = call(here, "10000", "elsewhere")
    assert "fp8.recipe=rowwise" in again
    assert call(here, "10000") == []
    found = json.loads((here / "elsewhere" / "quarter-hour.json").read_text())
    assert len(found) == 20 and {part["status"] for part in found.values()} == {0}
    rows = (here / "elsewhere" / "quarter-hour.md").read_text().splitlines()
    assert "| **waits** | status 0, 0 s of 60 |  |" in rows and "|  | a figure | 12 ms |" in rows
    assert shutil.which("xz") is None or (here / "elsewhere" / "quarter-hour.tar.xz").stat().st_size


def test_parts_that_have_not_run_come_before_those_that_failed(here: Path) -> None:
    """A part that fails does so once in a call. The file that it wrote before counts no more."""
    state = here / "build" / "quarter-hour"
    assert len(call(here, "10000", fails="doctor")) == 20
    (state / "machine.json").write_text('{"figures": {"a figure": "of an earlier call"}}')
    (state / "waits.status").unlink()
    new, failed = call(here, "10000", "elsewhere", fails="doctor")
    assert "device-waits" in new and "doctor" in failed
    assert json.loads((here / "elsewhere" / "quarter-hour.json").read_text())["machine"]["figures"] == {}


def test_fp8_is_checked_before_it_is_timed(whole: list[str]) -> None:
    words = "\n".join(whole)
    assert 0 < words.index("casts_are_bit_equal") < words.index("train.precision=fp8")


def test_a_part_that_does_not_fit_the_time_left_is_left_out(here: Path) -> None:
    assert [words.split()[1] for words in call(here, "30") if "lab" in words] == ["spin-gemm"]
    limits = [int(line) for line in (here / "limits").read_text().splitlines()]
    assert limits and max(limits) <= 30, "no part may outlast the time left"


def test_a_rehearsal_has_five_times_the_seconds(here: Path) -> None:
    """Of the whole, of a part's limit, and of what a part needs to begin: the shortest needs 50 s."""
    assert call(here, "49", rehearse=True) == []
    left = json.loads((here / "build" / "rehearsed-quarter-hour.json").read_text())
    assert len(left) == 20 and left["casts"] == {"left_out": "only a GPU can show it"}
    assert left["waits"]["left_out"].startswith("needs 300 s, ")
    rehearsed = call(here, rehearse=True)
    limits = [int(line) for line in (here / "limits").read_text().splitlines()]
    assert len(rehearsed) == 17 and limits[:2] == [450, 500] and max(limits) == 900
    assert all("--rehearse" in words for words in rehearsed if "test_gpu.py" in words)
    rows = (here / "build" / "rehearsed-quarter-hour.md").read_text().splitlines()
    assert rows[0] == "# rehearsed-quarter-hour" and sum("not run" in row for row in rows) == 3
    assert "|  | command | `env TRITON_INTERPRET=1 python3 tools/lab device-waits --device cpu` |" in rows
    assert not (here / "build" / "quarter-hour").exists(), "a rehearsal stands for no part"


def test_two_ranks_share_a_single_gpu(here: Path, whole: list[str]) -> None:
    for calls, shared in ((whole, True), (call(here, "10000", gpus=2), False)):
        of_two = [words for words in calls if "--gpus 2" in words]
        assert len(of_two) == 7 and all(words.startswith("shared ") is shared for words in of_two)
        assert not any(words.startswith("shared") for words in calls if "bench" in words or "--gpus 1" in words)


def part(folder: Path, result: Any, status: int = 0, errors: str = "", seconds: int = 3) -> dict[str, Any]:
    (folder / "x.status").write_text(f"{status} {seconds} 5 10 python x\n")
    (folder / "x.out").write_text(result if isinstance(result, str) else f"progress\n{json.dumps(result)}\n")
    (folder / "x.err").write_text(errors)
    return quarter_hour.read_part(folder / "x.status")


def test_a_failed_part_shows_its_last_line(tmp_path: Path) -> None:
    failed = part(tmp_path, "no JSON", 1, "Traceback\nRuntimeError: why\n")
    assert failed["figures"] == {} and failed["errors"][-1] == "RuntimeError: why"
    assert quarter_hour.table({"x": failed})[-2] == "| **x** | status 1, 3 s of 5 | RuntimeError: why |"
    cut = part(tmp_path, "no JSON", 137, "a warning\n", seconds=12)
    assert cut["errors"] == ["a warning", "ended at its limit of 10 s"]


def test_a_result_is_the_last_object_that_begins_a_line(tmp_path: Path) -> None:
    lines = "WARNING: {x} odd\n{also} odd\n", '{"figures": {"a": 1}}\n', '{"figures": {"b": 2}}\nbye {}\n{"cut": \n'
    assert part(tmp_path, "".join(lines))["figures"] == {"b": 2}
    assert part(tmp_path, json.dumps({"figures": {"c": 3}}, indent=1))["figures"] == {"c": 3}


def test_the_figures_of_every_kind_of_result(tmp_path: Path) -> None:
    figure = {"value": 1.25, "unit": "ms", "least": None, "most": None}
    tests = {"results": [{"name": "t", "outcome": "passed", "figures": {"step": figure}}]}
    assert part(tmp_path, tests)["figures"] == {"t": "passed; step 1.25 ms"}
    mfu = {
        "step_s": {"median": 0.5},
        "kernels": {"gemm": 0.7, "loss": 0.0},
        "mfu": {"causal": 0.6},
        "tokens_per_s": 9.6,
    }
    expected = {"step, ms": 500.0, "MFU causal, %": 60.0, "tokens/s": 10, "gemm, % of a step": 70.0}
    assert part(tmp_path, mfu)["figures"] == expected
    gemm = {
        "rates": [
            {"shape": "1x2x3", "format": "bf16", "rate": {"median": 7.0}},
            {"shape": "1x2x3", "format": "fp8", "rate": None},
        ]
    }
    assert part(tmp_path, gemm)["figures"] == {"1x2x3 bf16": 7.0, "1x2x3 fp8": None}
    doctor = {"machine": {"device": "H200", "count": 1, "gpu_software": {"NCCL": "2.30.7"}}}
    assert part(tmp_path, doctor)["figures"] == {"device": "H200", "NCCL": "2.30.7"}
