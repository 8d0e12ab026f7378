"""A soak: one job with a random fault every so often. Its effective training time, the driver's verdict about every
fault, and what the job leaves behind.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.fault_jobs import LIMIT_S, JobEnd, JobResult, injected_faults, run_job
from lab.resource_usage import HoldingsWatch, growth
from megascale.core.errors import Exit
from megascale.operate.driver.incidents import Incident

KINDS = ("kill", "stop", "hang", "hold_gil", "raise", "exit", "skip_collective", "lose_message", "slow_storage")
"""Kinds of the faults of a soak."""

ATTRIBUTION_S = 60.0
"""Longest time from a fault to its incident, in seconds."""

APART = 0.8
"""Least time between two faults, as a share of the mean: each has its own incident, after the start of the ranks."""

MOST_STEPS = 100_000
"""Steps that no soak reaches: the job is stopped."""

METRICS_FILE = "metrics.jsonl"

LIMITS = ("fault.restarts_per_hour=100000", "fault.restarts_in_place=100000", "fault.same_step_failures=1000")


@dataclass(frozen=True)
class FaultVerdict:
    """The verdict about one fault. `class_`, `ranks`, `action`: of the first incident after the fault; `class_` is ""
    without one. `verdict_s`: from the fault to the verdict; `new_step_s`: from there to the first new step.
    """

    kind: str
    phase: str
    rank: int
    step: int
    class_: str = ""
    ranks: tuple[int, ...] = ()
    action: str = ""
    verdict_s: float | None = None
    new_step_s: float | None = None
    steps_lost: int | None = None

    @property
    def named(self) -> bool:
        """True if the fault's rank is among the culprits."""
        return self.rank in self.ranks

    @property
    def alone(self) -> bool:
        """True if the fault's rank is the only culprit."""
        return self.ranks == (self.rank,)


@dataclass(frozen=True)
class SoakResult:
    """The result of a soak. `step_s`: median seconds of a step without faults; `verdicts`: about each fault;
    `same_curve`: the losses equal those of the job without faults; `held`: what long-lived processes held, at first and
    at last.
    """

    job: JobResult
    step_s: float
    verdicts: tuple[FaultVerdict, ...]
    same_curve: bool
    held: Mapping[str, tuple[float, float]]

    @property
    def effective(self) -> float:
        """Effective training time as in the paper: steps x step time / total."""
        return len(self.job.curve) * self.step_s / self.job.seconds

    @property
    def named(self) -> int:
        """The number of faults whose rank is among the culprits."""
        return sum(verdict.named for verdict in self.verdicts)

    @property
    def good(self) -> bool:
        return self.job.status == Exit.STOPPED and self.same_curve and not self.job.left_behind

    def lines(self) -> list[str]:
        """Return the result in words, with a Markdown table of the verdicts by kind."""
        held = ", ".join(f"{name} {first:g} -> {last:g}" for name, (first, last) in self.held.items())
        alone = sum(verdict.alone for verdict in self.verdicts)
        return [
            f"{len(self.job.curve)} steps in {self.job.seconds:.0f} s, status {self.job.status}",
            f"load average at the end {self.job.load:.0f}",
            f"{len(self.verdicts)} faults, {len(self.job.incidents)} incidents; {self.named} verdicts name the rank, "
            f"{alone} the rank alone",
            f"effective training time {self.effective:.1%} (a step takes {self.step_s:.2f} s without faults)",
            f"losses {'equal' if self.same_curve else 'DIFFER FROM'} those of the job without faults",
            f"supervisor, driver and agents at first and at last: {held}",
            *(f"left behind: {what}" for what in self.job.left_behind),
            "",
            *table(self.verdicts),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "steps": len(self.job.curve),
            "seconds": self.job.seconds,
            "status": self.job.status,
            "load": self.job.load,
            "step_s": self.step_s,
            "effective": self.effective,
            "faults": len(self.verdicts),
            "named": self.named,
            "alone": sum(verdict.alone for verdict in self.verdicts),
            "same_curve": self.same_curve,
            "left_behind": list(self.job.left_behind),
            "held": dict(self.held),
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "incidents": [incident.to_dict() for incident in self.job.history.incidents.values()],
        }


@dataclass(frozen=True)
class SoakPlan:
    """A soak of `seconds`, or until `faults` faults are dealt with: random `kinds`, one every `every` seconds on
    average.
    """

    seconds: int
    every: int = 30
    seed: int = 1
    kinds: tuple[str, ...] = KINDS
    faults: int | None = None


def run_soak(folder: Path, nodes: int, plan: SoakPlan) -> SoakResult:
    """Train with faults, then as many steps without faults."""
    constant = "optimizer.decay=constant"  # the rate must not depend on the number of steps
    inject = f"random mtbf_s={plan.every} apart={APART * plan.every:g} seed={plan.seed} kinds={','.join(plan.kinds)}"
    run, settings = folder / "soak", (f"train.steps={MOST_STEPS}", constant, *LIMITS)
    most = plan.faults or MOST_STEPS  # the next fault comes after the recovery from the last one
    end = JobEnd(plan.seconds, until=lambda: len(list(injected_faults(run))) > most)
    watch = HoldingsWatch(run)
    watch.start()
    try:
        job = run_job(folder, run.name, nodes, *settings, inject=inject, end=end)
    finally:
        watch.end()
    steps = max(len(job.curve), 2)
    limit_s = job.seconds + LIMIT_S  # without faults no step takes longer
    undisturbed = run_job(folder, "undisturbed", nodes, f"train.steps={steps}", constant, end=JobEnd(limit_s=limit_s))
    verdicts = find_verdicts(list(injected_faults(run)), job.incidents)
    step_s = statistics.median(_step_times(folder / "undisturbed"))
    return SoakResult(job, step_s, verdicts[: plan.faults], job.curve == undisturbed.curve, growth(watch.looks))


def find_verdicts(faults: Sequence[Mapping[str, Any]], incidents: Sequence[Incident]) -> tuple[FaultVerdict, ...]:
    """Return the verdict about each fault of the log: that of the first incident after it, within ATTRIBUTION_S.

    The last fault is left out without an incident: the end of the soak came first.
    """
    verdicts = []
    for fault in sorted(faults, key=lambda fault: float(fault["time"])):
        where = (fault["kind"], fault["phase"], fault["rank"], fault["step"])
        after = [one for one in incidents if 0 <= one.verdict - fault["time"] <= ATTRIBUTION_S]
        if not after:
            verdicts.append(FaultVerdict(*where))
            continue
        first = min(after, key=lambda incident: incident.verdict)
        whole = min((one for one in after if one.recovered), key=lambda incident: incident.verdict, default=first)
        new_step_s = None if whole.recovered is None else whole.recovered - first.verdict
        verdict_s, ranks = first.verdict - fault["time"], first.culprit.ranks
        verdicts.append(
            FaultVerdict(*where, first.class_, ranks, whole.action.kind, verdict_s, new_step_s, whole.steps_lost)
        )
    return tuple(verdicts[:-1] if verdicts and not verdicts[-1].class_ else verdicts)


def table(verdicts: Sequence[FaultVerdict]) -> Iterator[str]:
    """Yield the lines of a Markdown table: by kind of fault, verdicts and times (median, most)."""
    yield "| fault | injected | names the rank | alone | classes | verdict, s | first new step, s | steps lost |"
    yield "|---|---|---|---|---|---|---|---|"
    for kind in (*sorted({verdict.kind for verdict in verdicts}), ""):
        some = [verdict for verdict in verdicts if kind in ("", verdict.kind)]
        classes = Counter(verdict.class_ or "no incident" for verdict in some)
        cells = [
            kind or "all",
            str(len(some)),
            str(sum(verdict.named for verdict in some)),
            str(sum(verdict.alone for verdict in some)),
            ", ".join(f"{name} {count}" for name, count in classes.most_common()),
            _spread([verdict.verdict_s for verdict in some]),
            _spread([verdict.new_step_s for verdict in some]),
            f"at most {max((verdict.steps_lost or 0 for verdict in some), default=0)}",
        ]
        yield f"| {' | '.join(cells)} |"


def _spread(times: Sequence[float | None]) -> str:
    known = [time for time in times if time is not None]
    return f"{statistics.median(known):.1f}, at most {max(known):.1f}" if known else "none"


def _step_times(run: Path) -> Iterator[float]:
    for line in (run / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        if "step_time_s" in (record := json.loads(line)):
            yield record["step_time_s"]
