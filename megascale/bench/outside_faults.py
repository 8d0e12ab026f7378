"""Faults of nodes and of the driver, which strike a running `megascale launch` from outside.

All processes of a job inherit a variable that names the run's folder; those of a node also have its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from megascale.config.injection import Fault, parse_injection
from megascale.core.rank import NODE_VARIABLE
from megascale.fault.inject import InjectionLog, PlannedFault, describe, faults_of_target

RUN_VARIABLE = "MEGASCALE_FAULTS_RUN"
"""Environment variable that marks the processes of a job: the folder of its run."""

POLL_S = 0.05


class OutsideFaults(threading.Thread):
    """A thread that injects the faults of nodes and driver in `text` (`fault.inject`) into the job of the run in
    `folder`. A fault strikes once the run has finished the step before.
    """

    def __init__(self, text: str, folder: Path) -> None:
        super().__init__(daemon=True)
        self._injection = parse_injection(text)
        self._folder = folder
        self._ended = threading.Event()

    def run(self) -> None:
        if all(fault.target == "rank" for fault in self._injection.faults):
            return
        while not last_step(self._folder):  # the run's folder and the log of its faults are there then
            if self._ended.wait(POLL_S):
                return
        faults = [fault for target in ("node", "driver") for fault in self._remaining(target)]
        for fault in sorted(faults, key=lambda fault: fault.step):
            while last_step(self._folder) < fault.step - 1:
                if self._ended.wait(POLL_S):
                    return
            InjectionLog(self._folder).add(PlannedFault(describe(fault), fault), "", fault.step)
            strike_from_outside(fault, self._folder)

    def end(self) -> None:
        """Stop waiting for steps, and end the thread."""
        self._ended.set()
        self.join()

    def _remaining(self, target: str) -> list[Fault]:
        return faults_of_target(self._injection, target, self._folder)


def strike_from_outside(fault: Fault, run: Path) -> None:
    """Let a fault of a node or of the driver strike the job. Raises: ValueError for a kind that needs a network"""
    node = f"node{fault.node}"
    match fault.kind:
        case "kill_driver":
            _signal(job_processes(run, command="driver"), signal.SIGKILL)
        case "kill_agent":
            _signal(job_processes(run, node, command="agent"), signal.SIGKILL)
        case "lose_node":
            _signal(job_processes(run, node), signal.SIGKILL)
        case "stop_node":
            stopped = job_processes(run, node)
            _signal(stopped, signal.SIGSTOP)
            if fault.for_s is not None:
                time.sleep(fault.for_s)
                _signal(stopped, signal.SIGCONT)
        case _:
            raise ValueError(f"{fault.kind} needs hosts of a testbed")


def job_processes(run: Path, node: str = "", command: str = "") -> list[int]:
    """Return the processes of a run's job: of a node, and of a subcommand of megascale; all if empty."""
    marks = {f"{RUN_VARIABLE}={run}".encode(), *([f"{NODE_VARIABLE}={node}".encode()] if node else [])}
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            variables = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if marks <= variables and (not command or [b"megascale", command.encode()] == words[2:4]):
                found.append(pid)
    return found


def last_step(folder: Path) -> int:
    """Return the last step in a run's metrics, 0 before the first."""
    return max((step for step, _ in loss_curve(folder)), default=0)


def loss_curve(folder: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of a run's metrics; of a step that was trained twice the last."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return sorted({record["step"]: record["loss"] for record in records if "loss" in record}.items())


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
