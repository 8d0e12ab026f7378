"""Logs do not stay behind in shared memory."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megascale.core.rank import Rank
from megascale.record import log_files as files
from megascale.record.log import LogIdentity, open_log
from megascale.record.log_files import (
    ATTEMPT_VARIABLE,
    FLIGHT_RECORD_VARIABLE,
    LOOK_S,
    log_files,
    log_of_rank,
    process_states,
    read_states,
)
from megascale.record.log_reader import read_state
from megascale.record.rank_state import SILENT_S, RankState


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_files_are_removed_after_the_block_also_on_an_error(shared_memory: Path) -> None:
    with pytest.raises(KeyboardInterrupt), log_files("a run", range(2)) as paths:
        open_log(LogIdentity("a run", 0, 2), paths[0])
        assert {rank: record.rank for rank, record in read_states(paths).items()} == {0: 0}
        raise KeyboardInterrupt
    assert not list(shared_memory.iterdir())


LEFT = """
import sys
from pathlib import Path
from megascale.record.log import LogIdentity, open_log
path = Path(sys.argv[1])
open_log(LogIdentity("a run"), path)
"""


def test_files_of_ended_ranks_are_removed_first(shared_memory: Path) -> None:
    for name in ("a_run-7-00000", "a_run-7-00001", "another-7-00000"):
        path = shared_memory / f"megascale-{os.geteuid()}-{name}.flight"
        subprocess.run([sys.executable, "-c", LEFT, str(path)], check=True)
    assert len(list(shared_memory.iterdir())) == 3
    with log_files("a run", ()):
        [left] = shared_memory.iterdir()
        assert left.name.endswith("-another-7-00000.flight")


def test_children_of_a_rank_that_died_with_its_launcher_are_killed(shared_memory: Path) -> None:
    """Their environment names its record; those of another rank go on."""
    left = [shared_memory / f"megascale-{os.geteuid()}-{name}-7-00000.flight" for name in ("a_run", "another")]
    children = []
    for path in left:
        subprocess.run([sys.executable, "-c", LEFT, str(path)], check=True)
        env = os.environ | {FLIGHT_RECORD_VARIABLE: str(path)}
        children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=env))
    with log_files("a run", ()):
        assert children[0].wait(30) == -signal.SIGKILL
    assert children[1].poll() is None
    children[1].kill()
    children[1].wait()


def test_files_of_running_ranks_stay(shared_memory: Path) -> None:
    """Two jobs of the same run's name, in two folders."""
    with log_files("a run", [0]) as paths:
        open_log(LogIdentity("a run"), paths[0])
        with log_files("a run", [0]):
            assert paths[0].exists()


@pytest.mark.parametrize("collected", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_a_rank_without_launcher_and_collector_removes_its_own_file(
    shared_memory: Path, named: bool, collected: bool
) -> None:
    env = {FLIGHT_RECORD_VARIABLE: str(shared_memory / "named"), ATTEMPT_VARIABLE: "4"} if named else {}
    with log_of_rank(Path("a run"), Rank(1, 2, 1, "host"), env, collected=collected):
        [path] = shared_memory.iterdir()
        record = read_state(path)
    assert (record.rank, record.world, record.attempt) == (1, 2, 4 if named else 0)
    assert path.exists() == (named or collected)


def test_a_rank_that_fails_leaves_its_file(shared_memory: Path) -> None:
    with pytest.raises(ZeroDivisionError), log_of_rank(Path("a run"), Rank(1, 2, 1, "host"), {}):
        raise ZeroDivisionError
    assert len(list(shared_memory.iterdir())) == 1


HOLD = """
import ctypes, re, sys
print("begun", flush=True)
ctypes.PyDLL(None).sleep(600) if sys.argv[1] == "sleep" else re.match(r"(a?){64}a{64}", "a" * 64)
"""


def silent_record(path: Path, pid: int) -> RankState:
    """Return the record of a process whose heartbeat thread does not run."""
    open_log(LogIdentity(), path)
    record = read_state(path)
    return replace(record, pid=pid, heartbeat_ns=record.read_ns - int(2e9 * SILENT_S))


@pytest.mark.parametrize(("how", "letter"), [("sleep", "S"), ("compute", "R")])
def test_a_process_that_holds_python_s_lock_sleeps_or_computes(how: str, letter: str, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, how], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"begun\n"
            record = silent_record(tmp_path / "record", process.pid)
            deadline = time.monotonic() + 60
            while (states := process_states({5: record})) != {5: letter}:  # it is on its way there
                assert time.monotonic() < deadline, states
        finally:
            process.kill()
    assert process_states({5: record}) == {}


@pytest.mark.parametrize(("used_s", "letter"), [(0.0, "S"), (LOOK_S / 20, "S"), (LOOK_S / 2, "R")])
def test_a_process_whose_first_thread_sleeps_computes_if_it_uses_a_core(
    used_s: float, letter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits for Python's lock wakes up 200 times a second."""
    clock = itertools.count()
    monkeypatch.setattr(files, "process_state", lambda pid: "S")
    monkeypatch.setattr(files, "cpu_seconds", lambda pid: 7.0 + used_s * next(clock))
    record = silent_record(tmp_path / "record", os.getpid())
    assert process_states({0: record}) == {0: letter}
    assert process_states({0: replace(record, heartbeat_ns=record.read_ns)}) == {0: "S"}, "it does not hold the lock"
