"""`megascale doctor nodes` with a node that gets a part of a core: comparison names that node. What a throttled node
measures depends on the load of this host, and is measured in slow tests; in the quick one the rates are given.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import pytest

from lab.cpu_quota import CpuQuota, CpuQuotaError
from lab.outside_faults import RUN_VARIABLE, job_processes
from megascale.cli.doctor_nodes import diagnose_processes
from megascale.operate.health.diagnose import DiagnosisPlan


class Throttle(Protocol):
    def limit(self, pids: Sequence[int]) -> None: ...

    def lift(self) -> None: ...


class StopAndGo:
    """What the kernel does for a quota, by signals, for a machine without quotas: processes run 2 ms of 100."""

    def __init__(self) -> None:
        self._pids: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def limit(self, pids: Sequence[int]) -> None:
        self._pids += pids

    def lift(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.002):
            self._send(signal.SIGSTOP)
            self._ended.wait(0.098)
            self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        for pid in list(self._pids):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def is_measuring(pid: int) -> bool:
    """The loopback check has a second thread, which sends; before it Python starts, which takes long when throttled."""
    return len(os.listdir(f"/proc/{pid}/task")) > 1


@contextmanager
def throttled(
    throttle: Throttle, run: Path, node: str, when: Callable[[int], bool] = lambda pid: True
) -> Iterator[list[int]]:
    """Throttle the processes of a node, once `when` is true; yield the list of those found."""
    found: list[int] = []
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(0.01):
            for pid in job_processes(run, node):
                with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    if pid not in found and when(pid):
                        throttle.limit([pid])
                        found.append(pid)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        throttle.lift()


def quota(cores: float = 0.02) -> Throttle:
    """Part of a core, in slices of the kernel's usual period."""
    try:
        return CpuQuota(f"megascale-test-{os.getpid()}", cores, period_us=100_000)
    except CpuQuotaError as error:
        pytest.skip(str(error))


GIVEN_RATES = """
import os
from megascale.operate.health.checks import host

def receive_for(receiver, seconds, transfer=host.receive_for):
    transfer(receiver, 0.0)
    return {"node0": 1.0e9, "node1": 0.35e9, "node2": 1.1e9}[os.environ["MEGASCALE_NODE"]]

host.receive_for = receive_for
"""


def test_a_node_whose_process_measures_less_is_named_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(GIVEN_RATES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])]))
    plan = DiagnosisPlan(checks="loopback", paths=False, repeats=1, tolerance=0.6)
    diagnosis = asyncio.run(diagnose_processes(3, plan))
    assert diagnosis.bad_nodes == {"node1": ("loopback: 33% of the other nodes' median",)}, diagnosis


@pytest.mark.slow
@pytest.mark.parametrize("make", [quota, StopAndGo])
def test_a_throttled_node_is_named_and_no_other(
    make: Callable[[], Throttle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    plan = DiagnosisPlan(checks="loopback", paths=False, repeats=1, tolerance=0.6)
    with throttled(make(), tmp_path, "node1", is_measuring) as found:
        diagnosis = asyncio.run(diagnose_processes(3, plan))
    assert found, "the node had processes"
    assert list(diagnosis.bad_nodes) == ["node1"], diagnosis
    assert diagnosis.bad_nodes["node1"][0].startswith("loopback: "), diagnosis
    rates = {verdict.node: verdict.value or 0.0 for verdict in diagnosis.verdicts}
    assert rates["node1"] < 0.4 * min(rates["node0"], rates["node2"])


@pytest.mark.slow
def test_the_command_names_a_throttled_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    command = [sys.executable, "-m", "megascale", "doctor", "nodes", "--processes", "3", "--json"]
    with throttled(quota(0.03), tmp_path, "node1", is_measuring):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    report = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert "node1" in report["bad_nodes"], report
    assert any(reason.startswith(("memory: ", "loopback: ", "gemm: ")) for reason in report["bad_nodes"]["node1"])
