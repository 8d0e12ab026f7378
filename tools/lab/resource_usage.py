"""Resources that the long-lived processes of a job hold: supervisor, driver and agents, which outlive many attempts."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lab.outside_faults import job_processes

LONG_LIVED = ("launch", "driver", "agent")
"""Commands of megascale whose processes last as long as the job."""

EVERY_S = 5.0
"""Seconds between looks."""

PART = 0.2
"""Share of the looks at either end of the job that `growth` compares."""


@dataclass(frozen=True)
class ResourceUsage:
    """Counts at one moment. Descriptors, sockets, threads and memory: of the long-lived processes; `processes` and
    `shared_files`, those of /dev/shm: of the job.
    """

    processes: int = 0
    descriptors: int = 0
    sockets: int = 0
    threads: int = 0
    memory_mib: int = 0
    shared_files: int = 0


def look(run: Path) -> ResourceUsage:
    """Return what the processes of a run's job hold now."""
    descriptors = sockets = threads = memory = 0
    for pid in (pid for command in LONG_LIVED for pid in job_processes(run, command=command)):
        with contextlib.suppress(OSError):
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            threads += int(status["Threads"])
            memory += int(status.get("VmRSS", "0 kB").split()[0])
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                descriptors += 1
                with contextlib.suppress(OSError):
                    sockets += str(entry.readlink()).startswith("socket:")
    shared = sum(run.name in file for file in os.listdir("/dev/shm"))
    return ResourceUsage(len(job_processes(run)), descriptors, sockets, threads, memory >> 10, shared)


class HoldingsWatch(threading.Thread):
    """A thread that looks at a run's job every EVERY_S seconds. `looks`: the results."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self.looks: list[ResourceUsage] = []
        self._run = run
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.looks.append(look(self._run))

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join()


def growth(looks: Sequence[ResourceUsage]) -> dict[str, tuple[float, float]]:
    """Return the median of every count in the first and in the last part of the looks."""
    count = max(1, round(len(looks) * PART))
    first, last = [asdict(one) for one in looks[:count]], [asdict(one) for one in looks[-count:]]
    return {
        name: (statistics.median(one[name] for one in first), statistics.median(one[name] for one in last))
        for name in (field.name for field in fields(ResourceUsage))
        if looks
    }
