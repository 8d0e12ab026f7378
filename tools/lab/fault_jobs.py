"""Jobs of `megascale launch` on this host with injected faults, as `python tools/lab faults` runs them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lab.fault_cases import RANKS_PER_NODE
from lab.outside_faults import RUN_VARIABLE, OutsideFaults, job_processes, loss_curve
from lab.testbed import Testbed, export_testbed
from megascale.config.injection import faults_of_ranks
from megascale.core.files import exists
from megascale.core.process import die_with_parent
from megascale.operate.driver.incidents import LOG_FILE, Incident, JobHistory, read_history
from megascale.operate.node.inject import INJECTED_FILE

LIMIT_S = 600.0
"""Longest time of a job, in seconds."""

POLL_S = 0.5

TORCH_CACHE = "torchinductor_"
"""Beginning of the name of torch's own cache among temporary files, which all jobs of a user share."""

MODEL = """
[model]
num_layers = 4
hidden_size = 64
num_heads = 4
vocab_size = 512
seq_length = 64
[parallel]
tp = 2
pp = 2
[batch]
micro = 1
global = 8
[train]
precision = "fp32"
log_every = 1
[optimizer]
lr = 1e-3
warmup_steps = 2
[data]
mock = true
[checkpoint]
every = 1000
in_memory_every = 1
replicate = true
[observe]
tensorboard = false
"""
"""The configuration of the jobs, without name, folder and number of steps."""


@dataclass(frozen=True)
class JobEnd:
    """The end of a job that does not end by itself: it gets SIGTERM after `stop_s` seconds, or once `until` is true. It
    is killed `limit_s` seconds after that, or after its start.
    """

    stop_s: float = math.inf
    until: Callable[[], bool] = lambda: False
    limit_s: float = LIMIT_S


@dataclass(frozen=True)
class JobResult:
    """A job that has ended: exit status, log of incidents, (step, loss), what it left behind: processes, shared memory,
    temporary files; `load`: this host's load average over the last minute, at the end.
    """

    status: int
    history: JobHistory
    curve: list[tuple[int, float]]
    injected: float | None
    seconds: float
    output: str
    left_behind: tuple[str, ...] = ()
    load: float = 0.0

    @property
    def incidents(self) -> list[Incident]:
        """The incidents that are no alerts, the oldest first."""
        return [one for one in self.history.incidents.values() if one.action.kind != "alert"]


def run_job(
    folder: Path,
    name: str,
    nodes: int,
    *settings: str,
    spares: int = 0,
    inject: str = "",
    end: JobEnd = JobEnd(),
    testbed: Testbed | None = None,
) -> JobResult:
    """Run `megascale launch` with faults, to its end. `settings`: overrides; `testbed`: its hosts are the nodes."""
    config = folder / "faults.toml"
    config.write_text(MODEL, encoding="utf-8")
    run, temporary = folder / name, folder / f"{name}-temporary"
    temporary.mkdir(exist_ok=True)
    shared = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", "megascale", "launch", str(config), f"name={name}", f"output_dir={folder}"]
    command += [f"parallel.dp={nodes * RANKS_PER_NODE // 4}", *settings, f"fault.inject={faults_of_ranks(inject)}"]
    command += ["--nodes", str(nodes), "--spares", str(spares)]
    command += ["--scheduler", "testbed"] if testbed is not None else []
    env = os.environ | {"OMP_NUM_THREADS": "1", RUN_VARIABLE: str(run), "TMPDIR": str(temporary)}
    started = time.monotonic()
    with open(folder / f"{name}.log", "wb") as log:
        launcher = _start(command, env, log, testbed)
        outside = OutsideFaults(inject, run, testbed)
        outside.start()
        try:
            status = _wait(launcher, run, end)
        finally:
            outside.end()
    seconds = time.monotonic() - started
    left = [f"process {pid}" for pid in job_processes(run)]
    left += [f"/dev/shm/{file}" for file in set(os.listdir("/dev/shm")) - shared if run.name in file]
    left += [str(path) for path in temporary.iterdir() if not path.name.startswith(TORCH_CACHE)]
    output = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    history, curve = read_history(run / LOG_FILE), loss_curve(run)
    injected = min((fault["time"] for fault in injected_faults(run)), default=None)
    return JobResult(status, history, curve, injected, seconds, output, tuple(left), os.getloadavg()[0])


def injected_faults(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the faults that struck a run, with their times in Unix seconds."""
    path = run / INJECTED_FILE
    for line in path.read_text(encoding="utf-8").splitlines() if exists(path) else []:
        if "fault" in (record := json.loads(line)):
            yield record


def _start(
    command: Sequence[str], env: Mapping[str, str], log: IO[bytes], testbed: Testbed | None
) -> subprocess.Popen[bytes]:
    if testbed is not None:
        return testbed.start_command(0, command, {**env, **export_testbed(testbed)}, stdout=log, stderr=log)
    parent = os.getpid()
    return subprocess.Popen(
        command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env,
        start_new_session=True, preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509
    )  # fmt: skip


def _wait(launcher: subprocess.Popen[bytes], run: Path, end: JobEnd) -> int:
    """Return the exit status."""
    stops, started, asked = end.stop_s < math.inf, time.monotonic(), False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return launcher.wait(POLL_S)
        passed = time.monotonic() - started
        if stops and not asked and (passed > end.stop_s or end.until()):
            launcher.terminate()
            started, asked = time.monotonic(), True
        elif (asked or not stops) and passed > end.limit_s:
            for pid in job_processes(run):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
