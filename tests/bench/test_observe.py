"""`megascale bench observe`: slowdowns of synthetic and real jobs, and whether the findings name them."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from megascale.bench import observe_jobs
from megascale.bench.observe import Judgement, is_good, judge, summary, synthetic_cases, table
from megascale.bench.observe_cases import HEALTHY, KINDS, draw_case, names_culprit
from megascale.bench.observe_jobs import SLOWDOWNS, judge_job, names_rank
from megascale.cli.main import main
from megascale.config.injection import parse_injection
from megascale.config.loading import load_config
from megascale.observe.findings import Finding, FindingKind


def finding(kind: FindingKind, culprit: str, *ranks: int) -> Finding:
    return Finding(kind, culprit, ranks, 1, None, 0.1, 0.1, ())


@pytest.mark.parametrize("kind", KINDS)
def test_kind_and_culprit_are_found(kind: str) -> None:
    judged = judge(draw_case(kind, 1))
    assert judged.right and not judged.others, [str(one) for one in judged.found]


@pytest.mark.slow
def test_at_least_95_of_100_and_no_false_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "observe", "--cases", "160", "--seed", "7"]) == 0
    out = capsys.readouterr().out
    assert "of 140 slowdowns right; 0 false alarms in 20 healthy jobs" in out


@pytest.mark.slow
def test_slowdowns_of_12288_ranks() -> None:
    cases = list(synthetic_cases(0, len(KINDS), 1))
    assert {case.layout.topology.world_size for case in cases} == {12_288}
    assert is_good([judge(case) for case in cases])


def test_cases_are_the_same_everywhere_and_vary() -> None:
    cases = list(synthetic_cases(24, 0, 3))
    assert cases == list(synthetic_cases(24, 0, 3))
    assert Counter(case.kind for case in cases) == dict.fromkeys(KINDS, 3)
    assert len({case.layout for case in cases}) > 12
    assert len({case.fault for case in cases}) > 18


def test_the_culprit_is_a_rank_a_node_both_ends_of_a_link_or_nobody() -> None:
    case = next(case for number in range(99) if (case := draw_case("slow link", number)).fault.peer >= 0)
    ends = [f"node n{end:04d}" for end in (case.fault.node, case.fault.peer)]
    assert names_culprit(finding("link", f"link {ends[0]} - {ends[1]}"), case.fault)
    assert not names_culprit(finding("link", ends[0]), case.fault)
    assert names_culprit(finding("job", "all ranks"), draw_case(HEALTHY, 1).fault)
    rank = draw_case("rank 10% slower", 1).fault
    assert names_culprit(finding("compute", "", rank.rank), rank)
    assert not names_culprit(finding("compute", "", rank.rank, rank.rank + 1), rank)
    assert names_rank(finding("link", "", 1, 3), 3) and not names_rank(finding("compute", "", 1, 3), 3)


def test_the_costliest_finding_counts_and_others_are_told() -> None:
    first, second = finding("job", "all ranks"), finding("compute", "rank 2", 2)
    late = Judgement("rank 10% slower", 1, "compute", (first, second), (False, True))
    right = Judgement("rank 10% slower", 2, "compute", (second,), (True,))
    alarm = Judgement(HEALTHY, 3, None, (second,), (False,))
    assert (late.right, late.among, late.others) == (False, True, 1)
    assert (right.right, right.others, alarm.right, alarm.others) == (True, 0, False, 1)
    assert summary([late, right, alarm]) == "1 of 2 slowdowns right; 1 false alarms in 1 healthy jobs"
    assert list(table([late, right, alarm]))[2:] == [
        "| rank 10% slower | 2 | 1 | 1 | 2 | 1 |",
        "| healthy | 1 | 0 | 0 | 0 | 1 |",
    ]
    assert is_good([right]) and not is_good([right, alarm]) and not is_good([right, late])


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "observe", "--cases", "2"]) == 0
    assert "synthetic jobs: 2 of 2 slowdowns right; 0 false alarms" in capsys.readouterr().out
    assert main(["bench", "observe", "--cases", "1", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["synthetic jobs"]
    assert one["right"] and one["found"][0]["kind"] == "compute"


@pytest.mark.parametrize("kind", SLOWDOWNS)
def test_slowdowns_of_real_jobs_can_be_injected(kind: str, tmp_path: Path) -> None:
    config = tmp_path / "observe.toml"
    config.write_text(observe_jobs.MODEL)
    slowdown = SLOWDOWNS[kind](random.Random(1))
    assert bool(parse_injection(slowdown.inject)) is (kind != HEALTHY)
    load_config(config, ["name=a", "train.steps=100", f"fault.inject={slowdown.inject}"], observe_jobs.WORLD)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slow link", "gc storm", "data stalls"])
def test_a_slowdown_of_a_real_job_is_among_the_findings(kind: str, tmp_path: Path) -> None:
    judged = judge_job(kind, 1, tmp_path)
    assert judged.among, [str(one) for one in judged.found]
