"""Whole jobs of `megascale launch`: the supervisor, its driver, agents and ranks, as processes of this host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.core.rank import NODE_VARIABLE
from megascale.operate.driver.incidents import LOG_FILE, JobHistory, read_history
from tests.jobs import Job, heed_signals, job_config
from tests.runs import GPT

SECONDS = 240


@dataclass(frozen=True)
class Process:
    """A process of a launch: "driver", "agent" or "rank", with its node and rank."""

    pid: int
    kind: str
    node: str = ""
    rank: int = -1


class LaunchedJob(Job):
    """A running `megascale launch`; steps and metrics are read as those of `megascale train`."""

    def __init__(self, config: Path, *arguments: str) -> None:
        self.folder = config.parent / "runs" / "test"
        self._config = str(config)
        self._output = open(config.parent / f"launch-{time.monotonic_ns()}.txt", "w+")  # noqa: SIM115  `end` reads it
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megascale", "launch", self._config, *arguments],
            env=dict(os.environ, OMP_NUM_THREADS="1"),
            stdout=self._output,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=heed_signals,
        )

    def processes(self) -> list[Process]:
        """The driver, agents and ranks, from /proc."""
        found, agents = [], {}
        table = list(_processes())
        for pid, parent, words, env in table:
            if parent == self.process.pid and "driver" in words[:5]:
                found.append(Process(pid, "driver"))
            elif parent == self.process.pid and "agent" in words[:5]:
                agents[pid] = Process(pid, "agent", env[NODE_VARIABLE])
        for pid, parent, _, env in table:
            if parent in agents and "RANK" in env:
                found.append(Process(pid, "rank", agents[parent].node, int(env["RANK"])))
        return [*found, *agents.values()]

    def pid(self, kind: str, *, node: str = "", rank: int = -1) -> int:
        """The process id of the driver, of a node's agent, or of a rank."""
        wanted = lambda p: p.kind == kind and node in ("", p.node) and rank in (-1, p.rank)  # noqa: E731
        return self.wait_until(
            lambda: next((p.pid for p in self.processes() if wanted(p)), None), f"{kind} {node} {rank}"
        )

    def ranks(self) -> dict[int, int]:
        return {process.rank: process.pid for process in self.processes() if process.kind == "rank"}

    @property
    def history(self) -> JobHistory:
        """What the log of incidents says now."""
        return read_history(self.folder / LOG_FILE)

    def wait_until(self, condition: Callable[[], Any], what: str) -> Any:
        """Return the condition's value once it is true."""
        deadline = time.monotonic() + SECONDS
        with self._ended_on_errors():
            while not (value := condition()):
                assert self.process.poll() is None, f"the job ended before: {what}\n{self.output()}"
                assert time.monotonic() < deadline, f"in vain: {what}\n{self.output()}"
                time.sleep(0.05)
        return value

    def wait_for_recovery(self, count: int = 1) -> None:
        """Return when so many incidents have been recovered from."""
        self.wait_until(
            lambda: sum(i.recovered is not None for i in self.history.incidents.values()) >= count,
            f"{count} recoveries",
        )

    def output(self) -> str:
        """The output so far."""
        return Path(self._output.name).read_text()

    def end(self, seconds: float = SECONDS) -> tuple[int, str, str]:
        with self._ended_on_errors():
            self.process.wait(seconds)
        return self.process.returncode, self.output(), ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _processes() -> Iterator[tuple[int, int, list[str], Mapping[str, str]]]:
    """Yield (pid, parent, command line, environment) of this user's processes."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        yield int(folder.name), parent, words, dict(v.split("=", 1) for v in variables if "=" in v)


def launch_config(folder: Path, **overrides: Any) -> Path:
    """Write the configuration of four ranks with copies in memory after every step."""
    settings = {"parallel__dp": 4, "train__steps": 30, "checkpoint__every": 1000, "checkpoint__in_memory_every": 1}
    return job_config(folder, GPT, **{**settings, **overrides})
