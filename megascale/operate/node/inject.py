"""Injected faults: the plan of a rank, the log of past faults, and the effects on the rank's own process.

A fault strikes once over all attempts of a job: the log in the run's folder outlives the process, and is written first.
`config.injection` has the grammar, `train.fault_injection` the moments of a rank.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megascale.config.injection import KINDS, PHASES, Fault, Injection, RandomFaults

INJECTED_FILE = "injected.jsonl"  # the log of injected faults, in the run's folder
RANDOM_PHASES = ("data", "forward", "backward", "optimizer")  # phases of every rank in every step, whatever the layout
GARBAGE = 50_000  # objects of an injected garbage collection: it lasts a millisecond or more

LASTING = ("slow", "slow_compute", "collect_garbage", "delay_message", "skip_collective")
"""Kinds with an effect at every moment of the phase in their steps."""


class InjectedError(RuntimeError):
    """The error of the fault `raise`."""


@dataclass(frozen=True)
class PlannedFault:
    """A fault of this rank. `due`: earliest time of a random fault (`time.time`); else 0."""

    name: str
    fault: Fault
    due: float = 0.0


class InjectionLog:
    """The append-only log RUN/injected.jsonl: the start of every attempt, and a line for every fault."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / INJECTED_FILE
        folder.mkdir(parents=True, exist_ok=True)
        self._append({"begin": time.time()})

    @property
    def began(self) -> float:
        """Time at which the first rank of the first attempt opened the log."""
        return min(float(line["begin"]) for line in self._lines() if "begin" in line)

    def struck(self) -> Counter[str]:
        """Return how often each fault has struck, by name."""
        return Counter(line["fault"] for line in self._lines() if "fault" in line)

    def add(self, planned: PlannedFault, phase: str, step: int) -> None:
        """Write a fault to the disk, just before the fault strikes."""
        fault = planned.fault
        place = {"rank": fault.rank, "node": fault.node, "step": step, "phase": phase}
        self._append({"fault": planned.name, "kind": fault.kind, "time": time.time()} | place)

    def _append(self, line: dict[str, Any]) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")  # one call: lines of ranks do not mix
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _lines(self) -> Iterator[dict[str, Any]]:
        return map(json.loads, self._path.read_text(encoding="utf-8").splitlines())


class Injector:
    """The faults of this rank. Every moment of the rank calls `strikes`."""

    def __init__(self, injection: Injection, rank: int, world: int, folder: Path) -> None:
        self._log = InjectionLog(folder)
        self._first_step = 0
        self._warm_since = math.inf  # its second step, when nothing is imported and connected any more
        struck = self._log.struck()
        self._planned: list[PlannedFault] = []
        self._logged: set[str] = set()
        for fault in injection.faults:
            name = describe(fault)
            if fault.target == "rank" and fault.rank == rank and not _used(struck, name, fault.times):
                self._planned.append(PlannedFault(name, fault))
        self._random = injection.random
        if self._random is not None:
            drawn = random_faults(self._random, world, self._log.began)
            self._future = (planned for planned in drawn if planned.fault.rank == rank and not struck[planned.name])
            self._next = next(self._future)

    def strikes(self, phase: str, step: int) -> Fault | None:
        """Return and log the fault of this phase of this step, if any; step 0 comes before the first step."""
        if self._random is not None and step:
            self._first_step = self._first_step or step
            if step > self._first_step:
                self._warm_since = min(self._warm_since, time.time())
            self._plan_random_fault(phase, step)
        for planned in self._planned:
            fault = planned.fault
            if fault.phase != phase or not fault.step <= step < fault.step + fault.steps:
                continue
            if fault.kind not in LASTING:
                self._planned.remove(planned)
            if planned.name not in self._logged:
                self._logged.add(planned.name)
                self._log.add(planned, phase, step)
            return fault
        return None

    def plans(self, kind: str) -> bool:
        """Return True if a fault of this kind is planned."""
        return any(planned.fault.kind == kind for planned in self._planned)

    def _plan_random_fault(self, phase: str, step: int) -> None:
        """Plan the next random fault for this step if due. Faults due while the rank did not train, and in its first
        step, are skipped.
        """
        planned = self._next
        if planned.due and math.isinf(self._warm_since):
            return
        while planned.due < self._warm_since if planned.due else planned.fault.step < step:
            planned = self._next = next(self._future)
        if planned.fault.phase == phase and (planned.due <= time.time() if planned.due else planned.fault.step == step):
            self._planned.append(replace(planned, fault=replace(planned.fault, step=step)))
            self._next = next(self._future)


def random_faults(settings: RandomFaults, world: int, began: float) -> Iterator[PlannedFault]:
    """Yield random faults without end, equal on all ranks. `began`: start of the job, for times between failures."""
    draw, at = random.Random(settings.seed), 0.0
    number = 0
    while True:
        number += 1
        mean = settings.mtbf_s or settings.mtbf_steps
        at += settings.apart + draw.expovariate(1 / (mean - settings.apart))
        kind, rank, phase = draw.choice(settings.kinds), draw.randrange(world), draw.choice(RANDOM_PHASES)
        if KINDS[kind].phases != PHASES:
            phase = KINDS[kind].phase
        step = 0 if settings.mtbf_s else math.ceil(at)
        fault = Fault(kind, step, rank=rank, phase=phase)
        yield PlannedFault(f"random {number}", fault, began + at if settings.mtbf_s else 0.0)


def faults_of_target(injection: Injection, target: str, folder: Path) -> list[Fault]:
    """Return the remaining faults of nodes or of the driver, for the program that runs the test."""
    struck = InjectionLog(folder).struck()
    mine = (fault for fault in injection.faults if fault.target == target)
    return [fault for fault in mine if not _used(struck, describe(fault), fault.times)]


def describe(fault: Fault) -> str:
    """Return a fault as its text in the configuration, with its phase and without defaults."""
    kind = KINDS[fault.kind]
    default = Fault(fault.kind, fault.step, phase="" if kind.phases else kind.phase)
    keys = (
        "rank", "node", "peer", "step", "phase", "for_s", "delay_s", "factor", "mbit", "cores", "bit", "steps",
        "status", "times",
    )  # fmt: skip
    words = [f"{key}={value:g}" if isinstance(value := getattr(fault, key), float) else f"{key}={value}"
             for key in keys if key == "step" or getattr(fault, key) != getattr(default, key)]  # fmt: skip
    return " ".join([fault.kind, *words])


def _used(struck: Counter[str], name: str, times: int) -> bool:
    """Return True if the fault has struck `times` times; remove these from the count, for further equal faults."""
    used = struck[name] >= times
    struck[name] -= times
    return used


def strike(fault: Fault, what: str) -> None:
    """Let a fault strike this process. `what`: the fault in words, for the error of `raise`."""
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            stop_process(os.getpid(), fault.for_s)
        case "exit":
            os._exit(fault.status)
        case "raise":
            raise InjectedError(f"injected: {what}")
        case "slow":
            time.sleep(fault.delay_s)
        case "collect_garbage":
            collect_garbage(fault.delay_s)
        case "hang":
            sleep_for(fault.for_s)
        case "hold_gil":
            hold_gil(fault.for_s)
        case "slow_storage":
            read_for(fault.for_s)


def stop_process(pid: int, for_s: float | None) -> None:
    """Stop a process; after `for_s` seconds another process lets it continue."""
    if for_s is not None:
        command: Sequence[str] = ["sh", "-c", f"sleep {for_s}; kill -CONT {pid}"]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    os.kill(pid, signal.SIGSTOP)


def sleep_for(for_s: float | None) -> None:
    """Sleep for `for_s` seconds, or without end; other threads run."""
    time.sleep(3600 if for_s is None else for_s)
    while for_s is None:
        time.sleep(3600)


def collect_garbage(for_s: float) -> None:
    """Let Python's garbage collector look through GARBAGE objects, again and again, for `for_s` seconds."""
    until = time.monotonic() + for_s
    held: list[list] = [[] for _ in range(GARBAGE)]
    while time.monotonic() < until:
        gc.collect()
    held.clear()


def hold_gil(for_s: float | None) -> None:
    """Keep Python's lock in C for `for_s` seconds, or compute there without end: no other thread runs."""
    if for_s is None:
        re.match(r"(a?){64}a{64}", "a" * 64)  # catastrophic backtracking: 2^64 steps
    else:
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(for_s * 1e6)))


def read_for(for_s: float | None) -> None:
    """Wait in a read without an answer for `for_s` seconds, or without end, like a read from a lost mount."""
    reader, writer = os.pipe()
    if for_s is not None:
        threading.Timer(for_s, os.write, (writer, b"\n")).start()
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
