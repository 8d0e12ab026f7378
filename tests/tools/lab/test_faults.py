"""`python tools/lab faults`: its cases, its judgement of a job, and one case from end to end."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from lab.__main__ import main
from lab.fault_cases import CASES, Expected, FaultCase
from lab.fault_jobs import MODEL, JobResult
from lab.faults import STEPS, judge, summary, table
from megascale.config.injection import faults_of_ranks, parse_injection
from megascale.config.loading import load_config_tree
from megascale.core.errors import Exit
from megascale.operate.driver.incidents import Action, Culprit, Incident, JobHistory

CASE = FaultCase("killed", "A1", "SIGKILL of a rank", "kill rank=2 step=6", Expected(("process",), (2,)))
INCIDENT = Incident(
    1, "process", "rank 2 was killed", Culprit((2,), ("node1",)), (), "", "", 0, 5, 10.0, 11.0, (),
    Action("restart"), 20.0, 5, 0,
)  # fmt: skip
CURVE = [(1, 2.0), (2, 1.5)]


def job(*incidents: Incident, **changes: object) -> JobResult:
    history = JobHistory(incidents={incident.id: incident for incident in incidents})
    return replace(JobResult(0, history, CURVE, 10.0, 30.0, "", load=3.2), **changes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_fault_that_can_be_injected(case: FaultCase) -> None:
    assert parse_injection(case.inject)
    assert set(case.expected.actions) <= {"restart", "replace", "replace_group", "shrink", "stop", "wait"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_has_a_configuration_that_is_accepted(case: FaultCase) -> None:
    inject = f"fault.inject={faults_of_ranks(case.inject)}"  # the others strike from outside
    overrides = ["name=case", "parallel.dp=2", f"train.steps={STEPS}", *case.settings, inject]
    assert load_config_tree(tomllib.loads(MODEL), "cases", overrides, 8).world_size == 8


def test_names_of_cases_are_unique_and_there_are_forty() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40


def test_a_job_as_expected_has_no_problem() -> None:
    assert judge(CASE, job(INCIDENT), CURVE).problems == ()


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (job(INCIDENT, status=1), "exit status 1 instead of 0"),
        (job(INCIDENT, injected=None), "the fault did not strike"),
        (job(INCIDENT, curve=[(1, 2.0), (2, 1.6)]), "the losses differ"),
        (job(INCIDENT, curve=[(1, 2.0)]), "the losses differ"),
        (job(INCIDENT, left_behind=("process 7",)), "left behind: process 7"),
        (job(), "no incident"),
        (job(replace(INCIDENT, class_="hang")), "class hang instead of process"),
        (job(replace(INCIDENT, culprit=Culprit((3,)))), "culprit: ranks (3,) instead of (2,)"),
        (job(replace(INCIDENT, action=Action("shrink"))), "action shrink instead of restart"),
        (job(replace(INCIDENT, steps_lost=2)), "2 steps lost, at most 1 expected"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_deviation_is_a_problem(result: JobResult, problem: str) -> None:
    (found,) = judge(CASE, result, CURVE).problems
    assert found.startswith(problem)


def test_the_table_shows_times_from_the_injected_fault() -> None:
    result = judge(CASE, job(INCIDENT), CURVE)
    *_, row = table([result])
    assert row == "| A1 | SIGKILL of a rank | process | rank 2 on node1 | restart | 1.0 | 9.0 | 0 | equal | 3 | yes |"
    calm = replace(CASE, expected=Expected())
    *_, row = table([judge(calm, job(), CURVE)])
    assert row.startswith(
        "| A1 | SIGKILL of a rank | no incident | none | training went on | no verdict | no restart | 0 |"
    )
    assert summary([result]).startswith("1 of 1 cases as expected; verdict: median 1.0 s")


def test_an_incident_that_may_be_unseen_is_none_or_as_expected() -> None:
    flap = replace(CASE, expected=Expected(("network",), actions=("wait",), unseen=True))
    assert judge(flap, job(), CURVE).problems == ()
    assert judge(flap, job(replace(INCIDENT, class_="network", action=Action("wait"))), CURVE).problems == ()
    assert judge(flap, job(INCIDENT), CURVE).problems


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "kiled in forward"]) == Exit.CONFIG
    assert "there is no case 'kiled in forward'  -> did you mean 'killed in forward'?" in capsys.readouterr().err


@pytest.mark.slow
def test_cases_go_as_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["killed in forward", "stopped in forward", "node lost, spare", "driver killed", "NaN"]
    status = main(["faults", *names, "--output", str(tmp_path), "--json"])
    results = json.loads(capsys.readouterr().out)["cases"]
    assert [result["problems"] for result in results] == [[]] * len(names)
    assert status == 0
