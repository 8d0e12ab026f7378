"""Stop signals close open files; imports are not collected."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import megascale
from megascale.core.process import (
    REQUEST_S,
    StopRequests,
    blocking_stops,
    exit_on_stop_signals,
    imports_to_keep,
    usable_cores,
)
from tests.jobs import heed_signals

WRITE = """
import sys, time
from pathlib import Path
from megascale.core.files import atomic_file
import megascale
from megascale.core.process import exit_on_stop_signals
with exit_on_stop_signals(), atomic_file(Path(sys.argv[1])) as file:
    print("open", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_open_files_are_closed(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE, str(tmp_path / "file")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + number, "")
    assert list(tmp_path.iterdir()) == []


SERVE = "from megascale.core.process import ignore_stops; ignore_stops(); print(input())"


def test_a_process_that_will_ignore_stop_signals_outlives_them_from_its_start() -> None:
    with blocking_stops():
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)  # before its first line runs
    assert process.communicate("served") == ("served\n", None)
    assert process.returncode == 0
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    with pytest.raises(KeyError), exit_on_stop_signals():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
        raise KeyError
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before


@pytest.mark.parametrize("option", ["-P", "-q"])
def test_a_child_imports_from_the_current_folder_only_if_its_parent_does(option: str, tmp_path: Path) -> None:
    """Another user's heapq.py in a folder where a job is started must not run in place of Python's."""
    (tmp_path / "heapq.py").write_text("import pathlib\npathlib.Path('planted').touch()\n")
    code = "import subprocess, sys\nfrom megascale.core.process import module_command\n"
    code += "subprocess.run(module_command('asyncio', '--help'), stdin=subprocess.DEVNULL)\n"
    subprocess.run(
        [sys.executable, option, "-c", code], cwd=tmp_path, capture_output=True, check=option == "-P", timeout=60
    )
    assert (tmp_path / "planted").exists() == (option != "-P")


def test_every_child_is_started_so() -> None:
    """torchrun adds the current folder itself; benchmarks and the testbed are started by developers."""
    package = Path(megascale.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r'sys\.executable,\s*\*?[^\n]*"-m"', path.read_text())
    }
    allowed = {"core/process.py", "launch/hosts.py", "bench/observe_jobs.py", "bench/fault_jobs.py"}
    assert found <= allowed, found - allowed


def test_deliveries_within_seconds_are_one_request() -> None:
    requests = StopRequests()
    assert (requests.count, requests.first) == (0, 0)
    assert [requests.add(signal.SIGHUP, now) for now in (0.0, 0.1, REQUEST_S - 0.01)] == [True, False, False]
    assert [requests.add(signal.SIGINT, now) for now in (REQUEST_S, REQUEST_S + 1)] == [True, False]
    assert (requests.count, requests.first) == (2, signal.SIGHUP)


def test_cores_are_those_of_processes_together_or_of_this_one_once_they_have_ended() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert usable_cores([ended.pid]) == usable_cores() == usable_cores([os.getpid(), ended.pid])


def test_nothing_is_collected_while_a_block_imports_or_of_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with imports_to_keep():
        assert not gc.isenabled() and not frozen
    assert frozen == [True]
