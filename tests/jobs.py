"""Whole jobs as a user starts them: `megascale train` in a new process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.runs import settings, write_config

SECONDS = 120

PIPE_BYTES = 1 << 20
"""Output that a job may write before anyone reads it: some ten thousand steps; 64 KiB, the default, are 600."""


def heed_signals() -> None:
    """Restore signal handling in a new process: background jobs of a shell, nohup and their children ignore signals."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Job:
    """A running `megascale train`. `folder` is the run's folder."""

    def __init__(self, config: Path, *overrides: str, env: dict[str, str] | None = None) -> None:
        self.folder = config.parent / "runs" / "test"
        environment = dict(os.environ, OMP_NUM_THREADS="1", **(env or {}))
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megascale", "train", str(config), *overrides],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_signals,
        )
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def steps(self) -> list[dict[str, Any]]:
        """The logged steps so far."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [record for record in records if "loss" in record]

    def wait_for_step(self, step: int) -> None:
        """Return when a step has been logged. A job may be slow, but not without a new step for SECONDS."""
        newest, since = 0, time.monotonic()
        with self._ended_on_errors():
            while (latest := max((record["step"] for record in self.steps()), default=0)) < step:
                assert self.process.poll() is None, self.end()
                newest, since = (newest, since) if latest == newest else (latest, time.monotonic())
                assert time.monotonic() < since + SECONDS, f"step {step} was not reached, but {latest}"
                time.sleep(0.02)

    def ranks(self) -> dict[int, int]:
        """Process ids by rank, from /proc."""
        pids = {}
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                parent = int((environ.parent / "stat").read_text().rpartition(")")[2].split()[1])
                variables = dict(v.split("=", 1) for v in environ.read_text().split("\0") if "=" in v)
            except (OSError, UnicodeDecodeError):
                continue
            if parent == self.process.pid and "RANK" in variables:
                pids[int(variables["RANK"])] = int(environ.parent.name)
        return pids

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def signal_all(self, number: int) -> None:
        """Send a signal to all processes of the job at once, as systemd does, or a host that shuts down."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill all processes of the job at once (SIGKILL), as at a power cut."""
        for pid in [*self.ranks().values(), self.process.pid]:
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def end(self, seconds: float = SECONDS) -> tuple[int, str, str]:
        """Wait up to `seconds` for the end; return exit status, stdout and stderr."""
        with self._ended_on_errors():
            out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    @contextlib.contextmanager
    def _ended_on_errors(self) -> Iterator[None]:
        """Kill the running job if the block fails or is interrupted, to release its devices."""
        try:
            yield
        except BaseException:
            if self.process.poll() is None:
                self.kill()
            raise


def job_config(folder: Path, model: dict[str, Any], **overrides: Any) -> Path:
    """Write a configuration file with the run's folder beside it, and a metrics record per step."""
    return write_config(settings(model, folder / "runs", **overrides), folder / "config.toml")


def finish(config: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run a job to its end and return its logged steps."""
    job = Job(config, *overrides)
    status, _, err = job.end()
    assert status == 0, err
    return job.steps()


def curve(steps: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of logged steps."""
    return [(record["step"], record["loss"], record["grad_norm"]) for record in steps]


def standby_processes(agent: int) -> list[int]:
    """The processes in standby of the agent with this process id."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent and b"standby" in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and that those have started."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, path.read_text().split())
    return [*children, *(found for child in children for found in descendants(child))]


def lives(pid: int) -> bool:
    """Return True if a process runs; False for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 30) -> None:
    """Wait for the ends of processes."""
    deadline = time.monotonic() + seconds
    while any(lives(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes outlive their job"
        time.sleep(0.05)
