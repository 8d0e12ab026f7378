"""Checks in processes of their own: results, and hangs, crashes and errors as problems."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from megascale.catalog.checks import CHECK_SETS, CHECKS
from megascale.core.registry import Card
from megascale.operate.channel.secret import SECRET_VARIABLE, new_secret
from megascale.operate.health.checks.result import CheckError, CheckResult
from megascale.operate.health.checks.runner import run_check
from tests.jobs import lives


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, new_secret())


def run(name: str, timeout_s: float = 60.0, **arguments: Any) -> CheckResult:
    return asyncio.run(run_check(name, arguments, timeout_s))


def test_a_result_survives_the_wire() -> None:
    result = CheckResult("set", parts=(CheckResult("disk", "byte/s", 1.5, 0.1, details={"folder": "/tmp"}),))
    assert CheckResult.from_dict(result.to_dict()) == result
    with pytest.raises(CheckError, match="unknown form: value"):
        CheckResult.from_dict({"name": "disk", "value": "fast"})


@pytest.mark.parametrize("name", [name for name in CHECKS.names() if CHECKS[name].facts["runs_on"] == "host"][:4])
def test_a_check_of_the_host_alone(name: str, tmp_path: Path) -> None:
    result = run(name, folder=str(tmp_path), disk_bytes=1 << 20, bytes=1 << 20, seconds=0.05)
    assert (result.name, result.problem, result.unit) == (name, "", CHECKS[name].facts["unit"])
    assert result.value is not None
    assert (result.value == 0) == (name == "limits")
    assert result.duration_s > 0
    assert list(tmp_path.iterdir()) == []


def test_sets_name_checks() -> None:
    assert {name for names in CHECK_SETS.values() for name in names} <= set(CHECKS.names())
    with pytest.raises(CheckError, match=r"no check 'memroy'.*did you mean memory"):
        run("memroy")


PLUGIN = """
import os, signal, time
from megascale.operate.health.checks.result import CheckResult

def hang(arguments):
    open(arguments["pid_file"], "w").write(str(os.getpid()))
    time.sleep(1000)

def crash(arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def fail(arguments):
    print("a library's output", flush=True)
    raise OSError(5, "Input/output error")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Checks of another package, found through an entry point."""
    (tmp_path / "badchecks.py").write_text(PLUGIN)
    names = ("hang", "crash", "fail")
    cards = "".join(
        f"{name} = Card({name!r}, 'a bad check', 'badchecks:{name}', "
        "dict(unit='', better='higher', runs_on='host', noise=0, floor=0, min_ranks=1))\n"
        for name in names
    )
    (tmp_path / "badcards.py").write_text(f"from megascale.core.registry import Card\n{cards}")
    info = tmp_path / "bad-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: bad\nVersion: 1\n")
    points = "".join(f"{name} = badcards:{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[megascale.checks]\n{points}")
    facts = {"unit": "", "better": "higher", "runs_on": "host", "noise": 0.0, "floor": 0.0, "min_ranks": 1}
    for name in names:
        monkeypatch.setitem(CHECKS.cards, name, Card(name, "a bad check", f"badchecks:{name}", facts))
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_a_check_that_hangs_is_killed_and_a_result(plugin: dict[str, str], tmp_path: Path) -> None:
    assert run("hang", 2.0, env=plugin, pid_file=str(tmp_path / "pid")).problem == "no result within 2 s"
    folder = os.fsencode(tmp_path)
    assert not [file for file in Path("/proc").glob("[0-9]*/environ") if folder in _contents(file)]


def _contents(file: Path) -> bytes:
    """Return what is in a file, and nothing of a process that has ended or is another user's."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def test_a_check_that_crashes_or_fails_is_a_result(plugin: dict[str, str]) -> None:
    assert "killed by SIGKILL" in run("crash", env=plugin).problem
    assert run("fail", env=plugin).problem == "OSError: [Errno 5] Input/output error"


def test_a_check_ends_with_its_caller(plugin: dict[str, str], tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"""
import asyncio, os, pathlib
from megascale.catalog.checks import CHECK_SETS, CHECKS
from megascale.core.registry import Card
from megascale.operate.health.checks.runner import run_check
async def main():
    check = asyncio.ensure_future(run_check("hang", {{"pid_file": {str(pid_file)!r}}}, 100))
    while not (pathlib.Path({str(pid_file)!r}).exists() and pathlib.Path({str(pid_file)!r}).read_text()):
        await asyncio.sleep(0.05)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    import subprocess
    import time

    done = subprocess.run([sys.executable, "-c", code], env=os.environ | plugin, timeout=60, check=False)
    assert done.returncode == -9
    deadline = time.monotonic() + 10
    while lives(int(pid_file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)
