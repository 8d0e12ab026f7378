"""The parts of a process's start, in their order: import, rendezvous, ... up to the end of the first step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

IMPORT = "import"  # the first part, which begins with the process, or when a process in standby gets its task

TASK_TIME_VARIABLE = "MEGASCALE_TASK_TIME"
"""Environment variable of a process that was in standby: when it got its task, in seconds of the boot's clock."""


@dataclass(frozen=True)
class StartPart:
    """A part: `begun` and `ended`, in seconds of `time.perf_counter`; its `requests` to the job's store, and its
    `polls`, further ones, as many as others are waited for.
    """

    name: str
    begun: float
    ended: float
    requests: int
    polls: int

    @property
    def seconds(self) -> float:
        return self.ended - self.begun


class StartParts:
    """Notes the parts of a start. `count`: returns the requests and the polls so far."""

    def __init__(self) -> None:
        self._begun: list[tuple[str, float, tuple[int, int]]] = []
        self._ended = False
        self.count: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def begin(self, name: str) -> None:
        """Begin a part, which ends the one before; nothing after the end of the start."""
        if not self._ended:
            self._begun.append((str(name), time.perf_counter(), self.count()))

    def end(self) -> list[StartPart]:
        """End the start. Returns its parts."""
        self.begin("")
        self._ended = True
        begun, self._begun = [(IMPORT, process_start(), (0, 0)), *self._begun], []
        return [
            StartPart(name, start, end, after[0] - before[0], after[1] - before[1])
            for (name, start, before), (_, end, after) in pairwise(begun)
        ]


def process_start() -> float:
    """Return the time of `time.perf_counter` at which this process began, to 10 ms; that of the call without /proc.
    A process that was in standby began with its task.
    """
    now = time.perf_counter()
    if TASK_TIME_VARIABLE in os.environ:
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - float(os.environ[TASK_TIME_VARIABLE]))
    try:
        facts = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return now
    since_boot = int(facts[19]) / os.sysconf("SC_CLK_TCK")
    return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
