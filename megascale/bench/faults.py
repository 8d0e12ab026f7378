"""Faults injected into jobs of `megascale launch` on this host, and what came of them: `megascale bench faults`.

Every case trains the same small model, on as many agents as nodes. The first incident must name the culprit, the losses
must equal those of a job without faults, and nothing may be left behind.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascale.bench.fault_cases import RANKS_PER_NODE, FaultCase
from megascale.bench.outside_faults import RUN_VARIABLE, OutsideFaults, job_processes, loss_curve
from megascale.core.process import die_with_parent
from megascale.fault.incidents import LOG_FILE, Incident, JobHistory, read_history
from megascale.fault.inject import INJECTED_FILE

STEPS = 14
"""Steps of a case's job."""

LIMIT_S = 600.0
"""Longest time of a case's job, in seconds."""

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
memory_every = 1
replicate = true
[observe]
tensorboard = false
"""
"""The configuration of the jobs, without name, folder and number of steps."""


@dataclass(frozen=True)
class JobResult:
    """A job that has ended: exit status, log of incidents, (step, loss), processes and files of /dev/shm left."""

    status: int
    history: JobHistory
    curve: list[tuple[int, float]]
    injected: float | None
    seconds: float
    output: str
    left_behind: tuple[str, ...] = ()


@dataclass(frozen=True)
class CaseResult:
    """The result of a case. `problems`: what differs from what was expected; empty for success."""

    case: FaultCase
    job: JobResult
    problems: tuple[str, ...] = field(default=())

    @property
    def incident(self) -> Incident | None:
        """The first incident that is no alert."""
        return next((one for one in self.job.history.incidents.values() if one.action.kind != "alert"), None)

    @property
    def verdict_s(self) -> float | None:
        """Seconds from the injected fault to the verdict."""
        if self.incident is None or self.job.injected is None:
            return None
        return self.incident.verdict - self.job.injected

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        incident = self.incident
        return {
            "case": self.case.name,
            "reference": self.case.reference,
            "title": self.case.title,
            "inject": self.case.inject,
            "status": self.job.status,
            "seconds": round(self.job.seconds, 1),
            "verdict_s": self.verdict_s,
            "recovery_s": incident.recovery_s if incident else None,
            "steps_lost": incident.steps_lost if incident else None,
            "incidents": [one.to_dict() for one in self.job.history.incidents.values()],
            "problems": list(self.problems),
        }


def run_job(
    folder: Path,
    name: str,
    nodes: int,
    *settings: str,
    spares: int = 0,
    inject: str = "",
    stop_s: float = math.inf,
) -> JobResult:
    """Run `megascale launch` with faults, to its end or to SIGTERM after `stop_s` seconds. `settings`: overrides.

    A job that has not ended after LIMIT_S further seconds is killed.
    """
    config = folder / "faults.toml"
    config.write_text(MODEL, encoding="utf-8")
    run = folder / name
    shared = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", "megascale", "launch", str(config), f"name={name}", f"observe.dir={folder}"]
    command += [f"parallel.dp={nodes * RANKS_PER_NODE // 4}", *settings, f"fault.inject={inject}"]
    command += ["--nodes", str(nodes), "--spares", str(spares)]
    env = os.environ | {"OMP_NUM_THREADS": "1", RUN_VARIABLE: str(run)}
    parent, started = os.getpid(), time.monotonic()
    with open(folder / f"{name}.log", "wb") as log:
        launcher = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env,
            start_new_session=True, preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509
        )  # fmt: skip
        outside = OutsideFaults(inject, run)
        outside.start()
        try:
            status = _wait(launcher, run, stop_s)
        finally:
            outside.end()
    left = [f"process {pid}" for pid in job_processes(run)]
    left += [f"/dev/shm/{file}" for file in set(os.listdir("/dev/shm")) - shared if run.name in file]
    output = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    history, curve = read_history(run / LOG_FILE), loss_curve(run)
    injected = min((fault["time"] for fault in injected_faults(run)), default=None)
    return JobResult(status, history, curve, injected, time.monotonic() - started, output, tuple(left))


def run_case(case: FaultCase, folder: Path, nodes: int, undisturbed: Sequence[tuple[int, float]]) -> CaseResult:
    """Run a case, and compare with what is expected. `undisturbed`: losses of a job without faults."""
    name = case.name.replace(" ", "-").replace(",", "")
    steps = f"train.steps={STEPS}"
    job = run_job(folder, name, nodes, steps, *case.settings, spares=case.spares, inject=case.inject)
    return judge(case, job, undisturbed)


def judge(case: FaultCase, job: JobResult, undisturbed: Sequence[tuple[int, float]]) -> CaseResult:
    """Compare a job with what its case expects. `undisturbed`: losses of a job without faults."""
    return CaseResult(case, job, tuple(_problems(CaseResult(case, job), undisturbed)))


def _problems(result: CaseResult, undisturbed: Sequence[tuple[int, float]]) -> Iterable[str]:
    case, job, incident, expected = result.case, result.job, result.incident, result.case.expected
    if job.status != expected.status:
        yield f"exit status {job.status} instead of {int(expected.status)}"
    if job.injected is None:
        yield "the fault did not strike"
    if case.same_curve and job.curve != list(undisturbed):
        yield "the losses differ from those of the undisturbed run"
    yield from (f"left behind: {what}" for what in job.left_behind)
    if incident is None and expected.classes:
        yield "no incident"
    if incident is not None:
        yield from _problems_of_incident(case, incident, [*job.history.incidents.values()][-1].action.kind)


def _problems_of_incident(case: FaultCase, incident: Incident, last_action: str) -> Iterable[str]:
    expected = case.expected
    if not expected.classes:
        yield f"an incident: {incident.what}"
        return
    if incident.class_ not in expected.classes:
        yield f"class {incident.class_} instead of {' or '.join(expected.classes)}"
    if expected.ranks is not None and incident.culprit.ranks != expected.ranks:
        yield f"culprit: ranks {incident.culprit.ranks} instead of {expected.ranks}"
    if expected.nodes is not None and incident.culprit.nodes != expected.nodes:
        yield f"culprit: nodes {incident.culprit.nodes} instead of {expected.nodes}"
    if {incident.action.kind, last_action}.isdisjoint(expected.actions):
        yield f"action {incident.action.kind} instead of {' or '.join(expected.actions)}"
    if incident.steps_lost is not None and incident.steps_lost > case.most_lost:
        yield f"{incident.steps_lost} steps lost, at most {case.most_lost} expected"


def table(results: Sequence[CaseResult]) -> Iterable[str]:
    """Return the results as lines of a Markdown table."""
    yield "| case | fault | class | culprit | action | verdict, s | first new step, s | steps lost | as expected |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for result in results:
        incident = result.incident
        cells = [result.case.reference, result.case.title]
        if incident is None:
            cells += ["none", "", "none", "", "", ""]
        else:
            lost = "" if incident.steps_lost is None else str(incident.steps_lost)
            cells += [incident.class_, str(incident.culprit), incident.action.kind, _seconds(result.verdict_s)]
            cells += [_seconds(incident.recovery_s), lost]
        yield f"| {' | '.join(cells)} | {'; '.join(result.problems) or 'yes'} |"


def summary(results: Sequence[CaseResult]) -> str:
    """Return a line: cases as expected, and the medians and maxima of the times."""
    good = sum(not result.problems for result in results)
    verdicts = [result.verdict_s for result in results if result.verdict_s is not None]
    recoveries = [result.incident.recovery_s for result in results if result.incident and result.incident.recovery_s]
    text = f"{good} of {len(results)} cases as expected"
    for name, times in (("verdict", verdicts), ("first new step after the verdict", recoveries)):
        if times:
            text += f"; {name}: median {statistics.median(times):.1f} s, at most {max(times):.1f} s"
    return text


def run_cases(cases: Sequence[FaultCase], folder: Path, nodes: int, report: Callable[[str], None]) -> list[CaseResult]:
    """Run a job without faults, then the cases, one after another. `report`: gets a line about each."""
    undisturbed = run_job(folder, "undisturbed", nodes, f"train.steps={STEPS}")
    report(f"undisturbed: status {undisturbed.status}, {undisturbed.seconds:.0f} s, {len(undisturbed.curve)} steps")
    results = []
    for case in cases:
        result = run_case(case, folder, nodes, undisturbed.curve)
        results.append(result)
        what = "; ".join(result.problems) or "as expected"
        report(f"{case.name}: {what} (verdict {_seconds(result.verdict_s)} s, job {result.job.seconds:.0f} s)")
    return results


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def injected_faults(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the faults that struck a run, with their times in Unix seconds."""
    path = run / INJECTED_FILE
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if "fault" in (record := json.loads(line)):
            yield record


def _wait(launcher: subprocess.Popen[bytes], run: Path, stop_s: float) -> int:
    """Return the exit status. A job that does not end in time is asked to stop, and then killed."""
    if stop_s < math.inf:
        try:
            return launcher.wait(stop_s)
        except subprocess.TimeoutExpired:
            launcher.terminate()
    try:
        return launcher.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        for pid in job_processes(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return launcher.wait()
