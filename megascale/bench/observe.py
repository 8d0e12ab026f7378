"""How often the findings about a run are right: `megascale bench observe`.

Slowdowns of known kind and culprit go into synthetic jobs (`bench.observe_cases`) or into real ones
(`bench.observe_jobs`), and the findings of `observe.findings` are compared with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megascale.bench.fleet import Fleet
from megascale.bench.fleet_tables import cube_of
from megascale.bench.observe_cases import HEALTHY, KINDS, SlowdownCase, draw_case, names_culprit
from megascale.observe.findings import Finding, combine
from megascale.observe.job_cost import FindingKind

GOAL = 0.95
"""Share of the slowdowns whose kind and culprit must be right."""


@dataclass(frozen=True)
class Judgement:
    """The findings about a case of a kind of slowdown, the costliest first. `expected`: the kind of the right finding,
    None for none. `named`: which of them name the culprit.
    """

    kind: str
    number: int
    expected: FindingKind | None
    found: tuple[Finding, ...]
    named: tuple[bool, ...]

    @property
    def right_kind(self) -> bool:
        """True if the costliest finding is of the expected kind; without a slowdown, if there is no finding."""
        return self.found[0].kind == self.expected if self.found else self.expected is None

    @property
    def right(self) -> bool:
        """True if kind and culprit are right."""
        return self.right_kind and (not self.found or self.named[0])

    @property
    def among(self) -> bool:
        """True if any finding has the expected kind and names the culprit."""
        pairs = zip(self.found, self.named, strict=True)
        return any(one.kind == self.expected and named for one, named in pairs) if self.expected else not self.found

    @property
    def others(self) -> int:
        """Findings beside the right one."""
        return len(self.found) - (self.among and self.expected is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return the judgement as JSON values."""
        found = [finding.to_json() for finding in self.found]
        return {"kind": self.kind, "number": self.number, "right_kind": self.right_kind, "right": self.right,
                "among": self.among, "found": found}  # fmt: skip


def findings_of(fleet: Fleet) -> list[Finding]:
    """Return the findings about a synthetic job, from its tables in memory."""
    cube = cube_of(fleet)
    return combine(cube, cube, fleet.tables["events"])


def judge(case: SlowdownCase) -> Judgement:
    """Judge the findings about a synthetic case."""
    found = tuple(findings_of(case.fleet()))
    named = tuple(names_culprit(finding, case.fault) for finding in found)
    return Judgement(case.kind, case.number, KINDS[case.kind].finding, found, named)


def synthetic_cases(count: int, large: int, seed: int) -> Iterator[SlowdownCase]:
    """Yield `count` cases of 8 to 64 ranks and `large` cases of 12,288, the kinds in turn."""
    kinds = list(KINDS)
    for number in range(count + large):
        yield draw_case(kinds[number % len(kinds)], seed * 100_000 + number, large=number >= count)


def table(judgements: Sequence[Judgement]) -> Iterator[str]:
    """Yield the results by kind as lines of a Markdown table: whether the costliest finding is right, whether any is,
    and the number of others.
    """
    yield "| slowdown | cases | right kind | right kind and culprit | among the findings | further findings |"
    yield "|---|---|---|---|---|---|"
    for kind in dict.fromkeys(one.kind for one in judgements):
        mine = [one for one in judgements if one.kind == kind]
        counts = [sum(getattr(one, name) for one in mine) for name in ("right_kind", "right", "among", "others")]
        yield f"| {kind} | {len(mine)} | {' | '.join(map(str, counts))} |"


def summary(judgements: Sequence[Judgement]) -> str:
    """Return a line: slowdowns whose kind and culprit are right, and healthy jobs without a finding."""
    slow = [one for one in judgements if one.kind != HEALTHY]
    healthy = [one for one in judgements if one.kind == HEALTHY]
    alarms = sum(bool(one.found) for one in healthy)
    right = f"{sum(one.right for one in slow)} of {len(slow)} slowdowns right"
    return f"{right}; {alarms} false alarms in {len(healthy)} healthy jobs"


def is_good(judgements: Sequence[Judgement]) -> bool:
    """Return True if GOAL is reached without a false alarm."""
    slow = [one for one in judgements if one.kind != HEALTHY]
    healthy = [one for one in judgements if one.kind == HEALTHY]
    return sum(one.right for one in slow) >= GOAL * len(slow) and not any(one.found for one in healthy)


def judge_all(cases: Sequence[SlowdownCase], report: Callable[[str], None]) -> list[Judgement]:
    """Judge cases one after another. `report`: gets a line about each that is wrong."""
    judgements = []
    for case in cases:
        judgements.append(one := judge(case))
        if not one.right:
            report(f"{case.name}: {describe(one)}")
    return judgements


def describe(judgement: Judgement) -> str:
    """Return what was found, in a line."""
    return "; ".join(map(str, judgement.found)) or "nothing found"
