"""Processes in standby: they take over a rank's task, environment, descriptors and output, or end with their parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.operate.node import standby_process
from megascale.operate.node.standby_process import StandbyProcess
from megascale.record import start_parts
from tests.jobs import lives

CHILD = """
import json, os, sys
from megascale.operate.node.standby_process import take_task
arguments = take_task(int(sys.argv[-1]))
if arguments is not None:
    secret = os.read(int(os.environ["SECRET"].removeprefix("at ")), 100).decode()
    print(json.dumps([arguments, secret, dict(os.environ)]))
    print("error", file=sys.stderr)
"""


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> StandbyProcess:
    """A process in standby that imports nothing, and writes down its task."""
    monkeypatch.setattr(standby_process, "module_command", lambda *words: [sys.executable, "-c", CHILD, words[-1]])
    monkeypatch.setenv("ONLY_IN_STANDBY", "1")
    return StandbyProcess(2)


def test_a_process_takes_over_arguments_environment_descriptors_and_output(
    process: StandbyProcess, tmp_path: Path
) -> None:
    undecodable = os.fsdecode(b"\xff")
    env = {"PATH": os.environ["PATH"], "LARGE": "x" * 100_000, "UNDECODABLE": undecodable}
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    with open(tmp_path / "log", "wb") as log, tempfile.TemporaryFile() as secret:
        secret.write(b"a secret")
        secret.seek(0)
        process.give(["train", "a.toml"], env, {"SECRET": ("at ", secret.fileno())}, log.fileno())
    assert process.process.wait(30) == 0
    line, error = (tmp_path / "log").read_text().splitlines()
    arguments, read, found = json.loads(line)
    assert (arguments, read, error) == (["train", "a.toml"], "a secret", "error")
    assert env.items() <= found.items()
    assert found.keys() - env.keys() <= {"SECRET", start_parts.TASK_TIME_VARIABLE, "LC_CTYPE"}
    assert float(found[start_parts.TASK_TIME_VARIABLE]) >= before


def test_a_start_begins_with_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    since = time.perf_counter()
    monkeypatch.setenv(start_parts.TASK_TIME_VARIABLE, str(time.clock_gettime(time.CLOCK_BOOTTIME)))
    assert start_parts.process_start() >= since - 0.01
    monkeypatch.delenv(start_parts.TASK_TIME_VARIABLE)
    assert start_parts.process_start() < since - 0.01


def test_a_process_that_has_ended_takes_no_task(process: StandbyProcess, tmp_path: Path) -> None:
    assert process.waits
    process.process.send_signal(signal.SIGKILL)
    process.process.wait()
    assert not process.waits
    with open(tmp_path / "log", "wb") as log, pytest.raises(OSError, match=r".*"):
        process.give([], {}, {}, log.fileno())


def test_a_closed_process_has_ended(process: StandbyProcess) -> None:
    process.close()
    assert not lives(process.process.pid)


def test_a_process_without_a_task_ends_when_its_parent_closes_the_socket(process: Any) -> None:
    process._channel.close()
    assert process.process.wait(30) == 0


PARENT = """
import sys, time
from megascale.operate.node import standby_process
standby_process.module_command = lambda *words: [sys.executable, "-c", "import time; time.sleep(600)"]
print(standby_process.StandbyProcess(1).process.pid, flush=True)
time.sleep(600)
"""


def test_a_process_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert lives(pid)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 30
    while lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
