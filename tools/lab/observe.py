"""How often the findings about a run are right: `python tools/lab observe`.

Slowdowns of known kind and culprit go into synthetic jobs (`observe_cases`) or into real ones
(`observe_jobs`), and the findings of `slow.findings` are compared with them, and with what the steps lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lab.fleet import Fleet
from lab.fleet_tables import cube_of
from lab.observe_cases import KINDS, SlowdownCase, draw_case, names_culprit
from megascale.operate.diagnose.slow.finding import Finding
from megascale.operate.diagnose.slow.findings import combine

GOAL = 0.95
"""Share of the slowdowns whose kind and culprit must be right."""

LEAST_LOSS = 0.02
"""Share of a step that a slowdown costs to be judged: below, it may hide in the noise, and nobody else is accused."""

COST_FACTOR, ONSET_STEPS, GONE_STEPS = 1.5, 10, 50
"""Largest factor between a cost and what the steps lost, largest distance of an onset, and steps after the end of a
slowdown in which it is still the first finding.
"""


@dataclass(frozen=True)
class Truth:
    """The effect of a slowdown: the seconds that a step lost, of `step_s`, since step `since`."""

    lost_s: float
    step_s: float
    since: int


@dataclass(frozen=True)
class Judgement:
    """The findings about a case of a kind of slowdown, as they are listed; `named`: which of them are of the right kind
    and name the culprit. `truth`: None without a slowdown. `gone`: the slowdown is no first finding any more some steps
    after its end; None if it does not end. `after`: findings that accuse somebody else then, and go on.
    """

    kind: str
    number: int
    found: tuple[Finding, ...]
    named: tuple[bool, ...]
    truth: Truth | None
    gone: bool | None = None
    after: tuple[Finding, ...] = ()

    @property
    def is_small(self) -> bool:
        """True if the slowdown costs less than LEAST_LOSS."""
        return self.truth is not None and self.truth.lost_s < LEAST_LOSS * self.truth.step_s

    @property
    def accused(self) -> tuple[Finding, ...]:
        """Findings that name a wrong rank, node, link or group."""
        found = (one for one, named in zip(self.found, self.named, strict=True) if one.culprit.ranks and not named)
        return (*found, *self.after)

    @property
    def right(self) -> bool:
        """True if the first finding is right; without a slowdown, or for a small one, if nobody else is accused."""
        if self.truth is None or (self.is_small and not any(self.named)):
            return not self.accused
        return self.named[:1] == (True,)

    @property
    def right_cost(self) -> bool:
        """True if the first finding costs what the steps lost, but for COST_FACTOR."""
        truth = self._judged
        return truth is not None and 1 / COST_FACTOR <= self.found[0].cost_s / truth.lost_s <= COST_FACTOR

    @property
    def right_onset(self) -> bool:
        """True if the first finding begins with the slowdown, but for ONSET_STEPS."""
        truth = self._judged
        return truth is not None and abs(self.found[0].since - truth.since) <= ONSET_STEPS

    @property
    def _judged(self) -> Truth | None:
        """The truth about a slowdown whose first finding is right, and that is not small."""
        return self.truth if self.right and not self.is_small else None

    def to_dict(self) -> dict[str, Any]:
        """Return the judgement as JSON values."""
        found = [finding.to_json() for finding in self.found]
        truth = None if self.truth is None else asdict(self.truth)
        return {"kind": self.kind, "number": self.number, "truth": truth, "right": self.right, "gone": self.gone,
                "right_cost": self.right_cost, "right_onset": self.right_onset, "found": found}  # fmt: skip


def findings_of(fleet: Fleet) -> list[Finding]:
    """Return the findings about a synthetic job, from its tables in memory."""
    cube = cube_of(fleet)
    return combine(cube, cube, fleet.tables["events"])


def judge(case: SlowdownCase) -> Judgement:
    """Judge the findings about a synthetic case. What it lost is the difference to the same job without the fault."""
    fleet, kind, since = case.fleet(), KINDS[case.kind].finding, case.fault.since
    found = tuple(findings_of(fleet))
    named = tuple(finding.kind == kind and names_culprit(finding, case.fault) for finding in found)
    lost = (fleet.seconds - case.without_fault().fleet().seconds)[since + 1 :]
    truth = Truth(float(np.mean(lost)), float(fleet.seconds[since + 1 :].mean()), since + 1) if kind else None
    return Judgement(case.kind, case.number, found, named, truth)


def synthetic_cases(count: int, large: int, seed: int) -> Iterator[SlowdownCase]:
    """Yield `count` cases of 8 to 64 ranks and `large` cases of 12,288, the kinds in turn."""
    kinds = list(KINDS)
    for number in range(count + large):
        yield draw_case(kinds[number % len(kinds)], seed * 100_000 + number, large=number >= count)


def table(judgements: Sequence[Judgement]) -> Iterator[str]:
    """Yield the results by kind as lines of a Markdown table: of those that cost LEAST_LOSS of a step or more, how many
    are right; and findings that accuse a wrong culprit, of all.
    """
    head = (
        "slowdown", "cases", f"lost {LEAST_LOSS:.0%} or more", "kind and culprit first",
        f"cost within {COST_FACTOR} times", f"onset within {ONSET_STEPS} steps", f"gone after {GONE_STEPS} steps",
        "wrongly accused",
    )  # fmt: skip
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for kind in dict.fromkeys(one.kind for one in judgements):
        mine = [one for one in judgements if one.kind == kind]
        large = [one for one in mine if one.truth is not None and not one.is_small]
        counts = [sum(getattr(one, name) for one in large) for name in ("right", "right_cost", "right_onset")]
        ended = [one.gone for one in large if one.gone is not None]
        gone = f"{sum(ended)} of {len(ended)}" if ended else ""
        accused = sum(len(one.accused) for one in mine)
        cells = [kind, len(mine), len(large), *(counts if large else [""] * 3), gone, accused]
        yield f"| {' | '.join(map(str, cells))} |"


def summary(judgements: Sequence[Judgement]) -> str:
    """Return a line: slowdowns whose kind and culprit are right, and healthy jobs without an accusation."""
    slow = [one for one in judgements if one.truth is not None]
    healthy = [one for one in judgements if one.truth is None]
    alarms = sum(not one.right for one in healthy)
    right = f"{sum(one.right for one in slow)} of {len(slow)} slowdowns right"
    return f"{right}; {alarms} false alarms in {len(healthy)} healthy jobs"


def is_good(judgements: Sequence[Judgement]) -> bool:
    """Return True if GOAL is reached without a false alarm."""
    slow = [one for one in judgements if one.truth is not None]
    return sum(one.right for one in slow) >= GOAL * len(slow) and all(one.right for one in judgements if not one.truth)


def judge_all(cases: Sequence[SlowdownCase], report: Callable[[str], None]) -> list[Judgement]:
    """Judge cases one after another. `report`: gets a line about each that is wrong."""
    judgements = []
    for case in cases:
        judgements.append(one := judge(case))
        if not one.right:
            report(f"{case.name}: {describe(one)}")
    return judgements


def describe(judgement: Judgement) -> str:
    """Return what was lost and what was found, in a line."""
    truth = judgement.truth
    lost = f"{truth.lost_s:.3g} s of {truth.step_s:.3g} s lost since step {truth.since}: " if truth else ""
    after = f"; after its end: {'; '.join(map(str, judgement.after))}" if judgement.after else ""
    return lost + ("; ".join(map(str, judgement.found)) or "nothing found") + after
