"""Faults of nodes, links and the driver, which strike a running `megascale launch` from outside.

All processes of a job inherit a variable that names the run's folder; those of a node also have its name. Links need a
testbed, whose host i is node i; a full disk needs one of its own for the run's checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from lab.cpu_quota import CpuQuota
from lab.link_faults import LINK_FAULTS, link_fault
from lab.small_disk import empty_disk, fill_disk
from lab.testbed import Testbed
from megascale.config.injection import Fault, parse_injection
from megascale.core.files import exists
from megascale.core.rank import NODE_VARIABLE
from megascale.operate.node.inject import InjectionLog, PlannedFault, describe, faults_of_target

RUN_VARIABLE = "MEGASCALE_FAULTS_RUN"
"""Environment variable that marks the processes of a job: the folder of its run."""

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in that of a run."""

POLL_S = 0.05


class OutsideFaults(threading.Thread):
    """A thread that injects the faults of nodes and driver in `text` (`fault.inject`) into the job of the run in
    `folder`. A fault strikes once the run has finished the step before.
    """

    def __init__(self, text: str, folder: Path, testbed: Testbed | None = None) -> None:
        super().__init__(daemon=True)
        self._injection = parse_injection(text)
        self._folder = folder
        self._testbed = testbed
        self._lasting: list[Callable[[], object]] = []
        self._ended = threading.Event()

    def run(self) -> None:
        if all(fault.target == "rank" for fault in self._injection.faults):
            return
        while not last_step(self._folder):  # the run's folder is there then
            if self._ended.wait(POLL_S):
                return
        faults = [fault for target in ("node", "driver") for fault in self._remaining(target)]
        for fault in sorted(faults, key=lambda fault: fault.step):
            if not self._wait_for_step(fault.step - 1):
                return
            InjectionLog(self._folder).add(PlannedFault(describe(fault), fault), "", fault.step)
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        if fault.kind in LINK_FAULTS and self._testbed is not None:
            strike, heal = link_fault(fault, self._testbed)
        else:
            strike, heal = process_fault(fault, self._folder)
        strike()
        if fault.for_s is None and fault.steps == 1:
            self._lasting.append(heal)
            return
        if fault.for_s is None:
            self._wait_for_step(fault.step + fault.steps - 1)
        else:
            self._ended.wait(fault.for_s)
        heal()

    def _wait_for_step(self, step: int) -> bool:
        """Wait until the run has finished a step; return False if the job ended before."""
        while last_step(self._folder) < step:
            if self._ended.wait(POLL_S):
                return False
        return True

    def end(self) -> None:
        """Stop waiting for steps, end the thread, and end the faults that last."""
        self._ended.set()
        self.join()
        for heal in self._lasting:
            heal()

    def _remaining(self, target: str) -> list[Fault]:
        return faults_of_target(self._injection, target, self._folder)


def process_fault(fault: Fault, run: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two calls, the fault and its end, for a fault of the processes of a node, or of the driver.

    Raises: ValueError for a kind that needs a testbed
    """
    node = f"node{fault.node}"
    nothing = lambda: None  # noqa: E731
    match fault.kind:
        case "kill_driver":
            return lambda: _signal(job_processes(run, command="driver"), signal.SIGKILL), nothing
        case "kill_agent":
            return lambda: _signal(job_processes(run, node, command="agent"), signal.SIGKILL), nothing
        case "lose_node":
            return lambda: _signal(job_processes(run, node), signal.SIGKILL), nothing
        case "stop_node":
            stopped = job_processes(run, node)
            return lambda: _signal(stopped, signal.SIGSTOP), lambda: _signal(stopped, signal.SIGCONT)
        case "throttle_cpu":
            quota = CpuQuota(f"megascale-{os.getpid()}-{node}", fault.cores)
            return lambda: quota.limit(job_processes(run, node)), quota.lift
        case "fill_disk":
            disk = run / CHECKPOINTS
            return lambda: fill_disk(disk), lambda: empty_disk(disk)
        case _:
            raise ValueError(f"{fault.kind} needs hosts of a testbed")


def job_processes(run: Path, node: str = "", command: str = "", rank: int | None = None) -> list[int]:
    """Return the processes of a run's job: of a node, of a command of megascale, of a rank; all if empty."""
    variables = {RUN_VARIABLE: str(run), NODE_VARIABLE: node, "RANK": "" if rank is None else str(rank)}
    marks = {f"{name}={value}".encode() for name, value in variables.items() if value}
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            environment = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if marks <= environment and (not command or [b"megascale", command.encode()] in map(list, pairwise(words))):
                found.append(pid)
    return found


def last_step(folder: Path) -> int:
    """Return the last step in a run's metrics, 0 before the first."""
    return max((step for step, _ in loss_curve(folder)), default=0)


def loss_curve(folder: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of a run's metrics; of a step that was trained twice the last."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if exists(path) else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return sorted({record["step"]: record["loss"] for record in records if "loss" in record}.items())


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
