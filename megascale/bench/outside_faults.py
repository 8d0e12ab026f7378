"""Faults of nodes and of the driver, which strike a running `megascale launch` from outside.

A node of the local scheduler is the set of processes with its name in their environment.
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
from megascale.fault.inject import InjectionLog, PlannedFault, describe

POLL_S = 0.05


class OutsideFaults(threading.Thread):
    """A thread that injects the faults of nodes and driver in `text` (`fault.inject`) into a job. `launcher`: its
    process `megascale launch`. A fault strikes once the run in `folder` has finished the step before.
    """

    def __init__(self, text: str, launcher: int, folder: Path) -> None:
        super().__init__(daemon=True)
        faults = [fault for fault in parse_injection(text).faults if fault.target != "rank"]
        self._faults = sorted(faults, key=lambda fault: fault.step)
        self._launcher = launcher
        self._folder = folder
        self._ended = threading.Event()

    def run(self) -> None:
        for fault in self._faults:
            while last_step(self._folder) < fault.step - 1:
                if self._ended.wait(POLL_S):
                    return
            InjectionLog(self._folder).add(PlannedFault(describe(fault), fault), "", fault.step)
            strike_from_outside(fault, self._launcher)

    def end(self) -> None:
        """Stop waiting for steps, and end the thread."""
        self._ended.set()
        self.join()


def strike_from_outside(fault: Fault, launcher: int) -> None:
    """Let a fault of a node or of the driver strike the job. Raises: ValueError for a kind that needs a network"""
    node = f"node{fault.node}"
    match fault.kind:
        case "kill_driver":
            _signal(job_processes(launcher, command="driver"), signal.SIGKILL)
        case "kill_agent":
            _signal(job_processes(launcher, node, command="agent"), signal.SIGKILL)
        case "lose_node":
            _signal(job_processes(launcher, node), signal.SIGKILL)
        case "stop_node":
            stopped = job_processes(launcher, node)
            _signal(stopped, signal.SIGSTOP)
            if fault.for_s is not None:
                time.sleep(fault.for_s)
                _signal(stopped, signal.SIGCONT)
        case _:
            raise ValueError(f"{fault.kind} needs hosts of a testbed")


def job_processes(launcher: int, node: str = "", command: str = "") -> list[int]:
    """Return the processes under a launcher: of a node, and of a subcommand of megascale; all if empty."""
    parents = _parents()
    found = []
    for pid in parents:
        ancestor = pid
        while ancestor > 1 and ancestor != launcher:
            ancestor = parents.get(ancestor, 0)
        if ancestor != launcher or pid == launcher:
            continue
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            on_node = not node or f"{NODE_VARIABLE}={node}".encode() in variables
            if on_node and (not command or [b"megascale", command.encode()] == words[2:4]):
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


def _parents() -> dict[int, int]:
    """Return the parent of every process of this host."""
    parents = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[int(pid)] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return parents


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
