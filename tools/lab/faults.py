"""Faults injected into jobs of `megascale launch` on this host, and what came of them: `python tools/lab faults`.

Every case trains the same small model, on as many agents as nodes. The first incident must name the culprit, the losses
must equal those of a job without faults, and nothing may be left behind.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lab.cpu_quota import CpuQuotaError
from lab.fault_cases import Expected, FaultCase
from lab.fault_jobs import JobResult, run_job
from lab.outside_faults import CHECKPOINTS
from lab.small_disk import small_disk
from lab.testbed import HostLink, Testbed, TestbedError
from megascale.config.injection import parse_injection
from megascale.operate.driver.incidents import Incident

STEPS = 14
"""Steps of a case's job."""


@dataclass(frozen=True)
class CaseResult:
    """The result of a case. `problems`: what differs from what was expected; empty for success."""

    case: FaultCase
    job: JobResult
    problems: tuple[str, ...] = field(default=())

    @property
    def incident(self) -> Incident | None:
        """The first incident."""
        return next(iter(self.job.incidents), None)

    @property
    def verdict_s(self) -> float | None:
        """Seconds from the injected fault to the verdict."""
        if self.incident is None or self.job.injected is None:
            return None
        return self.incident.verdict - self.job.injected

    @property
    def new_step_s(self) -> float | None:
        """Seconds from the first verdict to the first new step, over further incidents before that step."""
        recovered = min((one.recovered for one in self.job.incidents if one.recovered), default=None)
        return None if recovered is None or self.incident is None else recovered - self.incident.verdict

    @property
    def steps_lost(self) -> int | None:
        """Most steps that an incident lost."""
        return max((one.steps_lost for one in self.job.incidents if one.steps_lost is not None), default=None)

    @property
    def actions(self) -> str:
        """The actions, in order, each once."""
        return ", then ".join(dict.fromkeys(one.action.kind.replace("_", " ") for one in self.job.incidents))

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "case": self.case.name,
            "reference": self.case.reference,
            "title": self.case.title,
            "inject": self.case.inject,
            "status": self.job.status,
            "seconds": round(self.job.seconds, 1),
            "load": self.job.load,
            "verdict_s": self.verdict_s,
            "new_step_s": self.new_step_s,
            "steps_lost": self.steps_lost,
            "incidents": [one.to_dict() for one in self.job.history.incidents.values()],
            "problems": list(self.problems),
        }


def run_case(case: FaultCase, folder: Path, nodes: int, undisturbed: Sequence[tuple[int, float]]) -> CaseResult:
    """Run a case, and compare with what is expected. `undisturbed`: losses of a job without faults.

    Raises: TestbedError or CpuQuotaError for a case that cannot run here
    """
    name = case.name.replace(" ", "-").replace(",", "")
    run = partial(run_job, folder, name, nodes, f"train.steps={STEPS}", *case.settings, spares=case.spares)
    if case.disk_bytes:
        with small_disk(folder / name / CHECKPOINTS, case.disk_bytes):
            return judge(case, run(inject=case.inject), undisturbed)
    if not case.testbed:
        return judge(case, run(inject=case.inject), undisturbed)
    with Testbed(nodes + case.spares, HostLink()) as testbed:
        for fault in parse_injection(case.inject).faults:
            if fault.delay_s:
                testbed.set_link(HostLink(delay_s=fault.delay_s))  # a trial: not every kernel can
                testbed.set_link(HostLink())
        return judge(case, run(inject=case.inject, testbed=testbed), undisturbed)


def judge(case: FaultCase, job: JobResult, undisturbed: Sequence[tuple[int, float]]) -> CaseResult:
    """Compare a job with what its case expects. `undisturbed`: losses of a job without faults."""
    return CaseResult(case, job, tuple(_problems(CaseResult(case, job), undisturbed)))


def _problems(result: CaseResult, undisturbed: Sequence[tuple[int, float]]) -> Iterable[str]:
    case, job, incident, expected = result.case, result.job, result.incident, result.case.expected
    if job.status != expected.status:
        yield f"exit status {job.status} instead of {int(expected.status)}"
    if job.injected is None:
        yield "the fault did not strike"
    if case.says not in job.output:
        yield f"the output does not say: {case.says}"
    if case.same_curve and job.curve != list(undisturbed):
        yield "the losses differ from those of the undisturbed run"
    yield from (f"left behind: {what}" for what in job.left_behind)
    if (result.steps_lost or 0) > case.most_lost:
        yield f"{result.steps_lost} steps lost, at most {case.most_lost} expected"
    if incident is None and expected.classes and not expected.unseen:
        yield "no incident"
    if incident is not None:
        yield from _problems_of_incident(case, incident, job.incidents[-1].action.kind)


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


def table(results: Sequence[CaseResult]) -> Iterable[str]:
    """Return the results as lines of a Markdown table."""
    yield (
        "| case | fault | class | culprit | action | verdict, s | first new step, s | steps lost | losses | load "
        "| as expected |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for result in results:
        incident, job = result.incident, result.job
        went_on = "training went on" if not job.status else "the job ended"
        cells = [result.case.reference, result.case.title]
        if incident is None:
            cells += ["no incident", "none", went_on, "no verdict", "no restart", "0"]
        else:
            missing = went_on if job.status else "no restart"
            lost = missing if result.steps_lost is None else str(result.steps_lost)
            cells += [incident.class_, str(incident.culprit), result.actions, _seconds(result.verdict_s)]
            cells += [_seconds(result.new_step_s) or missing, lost]
        cells += ["equal" if result.case.same_curve else "not compared", f"{job.load:.0f}"]
        yield f"| {' | '.join(cells)} | {'; '.join(result.problems) or 'yes'} |"


def summary(results: Sequence[CaseResult]) -> str:
    """Return a line: cases as expected, and the medians and maxima of the times."""
    good = sum(not result.problems for result in results)
    verdicts = [result.verdict_s for result in results if result.verdict_s is not None]
    new_steps = [result.new_step_s for result in results if result.new_step_s is not None]
    text = f"{good} of {len(results)} cases as expected"
    for name, times in (("verdict", verdicts), ("first new step after the verdict", new_steps)):
        if times:
            text += f"; {name}: median {statistics.median(times):.1f} s, at most {max(times):.1f} s"
    return text


def run_cases(
    cases: Sequence[FaultCase], folder: Path, nodes: int, report: Callable[[str], None]
) -> tuple[list[CaseResult], dict[str, str]]:
    """Run a job without faults, then the cases, one after another. `report`: gets a line about each.

    Returns the results, and why cases were left out, by name.
    """
    results: list[CaseResult] = []
    left_out: dict[str, str] = {}
    curves: dict[bool, Sequence[tuple[int, float]]] = {}
    for case in cases:
        try:
            if case.testbed not in curves:
                name = "undisturbed on a testbed" if case.testbed else "undisturbed"
                calm = run_case(FaultCase(name, "", "", "", Expected(), testbed=case.testbed), folder, nodes, ())
                curves[case.testbed] = calm.job.curve
                report(f"{name}: status {calm.job.status}, {calm.job.seconds:.0f} s, {len(calm.job.curve)} steps")
            result = run_case(case, folder, nodes, curves[case.testbed])
        except (TestbedError, CpuQuotaError) as error:
            left_out[case.name] = str(error).replace("\n", " ")
            report(f"{case.name}: left out: {left_out[case.name]}")
            continue
        results.append(result)
        what = "; ".join(result.problems) or "as expected"
        verdict = f"verdict {_seconds(result.verdict_s)} s, " if result.verdict_s is not None else ""
        report(f"{case.name}: {what} ({verdict}job {result.job.seconds:.0f} s, load {result.job.load:.0f})")
    return results, left_out


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
