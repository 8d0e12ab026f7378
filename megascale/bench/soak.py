"""A soak: one job with a random fault every so often, its effective training time, and what it leaves behind."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.bench.faults import JobResult, injected_faults, run_job
from megascale.core.errors import Exit
from megascale.fault.incidents import Incident

KINDS = ("kill", "stop", "hang", "hold_gil", "raise", "exit", "skip_collective", "lose_message", "slow_storage")
"""Kinds of the faults of a soak."""

ATTRIBUTION_S = 60.0
"""Longest time from a fault to its incident, in seconds."""

MOST_STEPS = 100_000
"""Steps that no soak reaches: the job is stopped."""

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class SoakResult:
    """The result of a soak. `step_s`: median seconds of a step without faults; `attributed`: faults whose incident has
    the rank as culprit; `same_curve`: the losses equal those of the job without faults.
    """

    job: JobResult
    step_s: float
    faults: int
    attributed: int
    same_curve: bool

    @property
    def effective(self) -> float:
        """Effective training time as in the paper: steps x step time / total."""
        return len(self.job.curve) * self.step_s / self.job.seconds

    @property
    def good(self) -> bool:
        return self.job.status == Exit.STOPPED and self.same_curve and not self.job.left_behind

    def lines(self) -> list[str]:
        """Return the result in words."""
        incidents = self.job.history.incidents.values()
        lost = sum(incident.steps_lost or 0 for incident in incidents)
        return [
            f"{len(self.job.curve)} steps in {self.job.seconds:.0f} s, status {self.job.status}",
            f"{self.faults} faults, {len(incidents)} incidents, {self.attributed} name the rank; {lost} steps lost",
            f"effective training time {self.effective:.1%} (a step takes {self.step_s:.2f} s without faults)",
            f"losses {'equal' if self.same_curve else 'DIFFER FROM'} those of the job without faults",
            *(f"left behind: {what}" for what in self.job.left_behind),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "steps": len(self.job.curve),
            "seconds": self.job.seconds,
            "status": self.job.status,
            "step_s": self.step_s,
            "effective": self.effective,
            "faults": self.faults,
            "attributed": self.attributed,
            "same_curve": self.same_curve,
            "left_behind": list(self.job.left_behind),
            "incidents": [incident.to_dict() for incident in self.job.history.incidents.values()],
        }


def run_soak(folder: Path, nodes: int, seconds: int, every: int, seed: int) -> SoakResult:
    """Train for `seconds` with a random fault every `every` seconds on average; then as many steps without faults."""
    constant = "optimizer.decay=constant"  # the rate must not depend on the number of steps
    inject = f"random mtbf_s={every} seed={seed} kinds={','.join(KINDS)}"
    limits = ("fault.restarts_per_hour=100000", "fault.restarts_in_place=100000", "fault.same_step_failures=1000")
    job = run_job(folder, "soak", nodes, f"train.steps={MOST_STEPS}", constant, *limits, inject=inject, stop_s=seconds)
    steps = max(len(job.curve), 2)
    undisturbed = run_job(folder, "undisturbed", nodes, f"train.steps={steps}", constant)
    faults = list(injected_faults(folder / "soak"))
    attributed = sum(_is_named(fault, job.history.incidents.values()) for fault in faults)
    step_s = statistics.median(_step_times(folder / "undisturbed"))
    return SoakResult(job, step_s, len(faults), attributed, job.curve == undisturbed.curve)


def _is_named(fault: Mapping[str, Any], incidents: Iterable[Incident]) -> bool:
    """Return True if the first incident after a fault has the fault's rank as its culprit."""
    after = [incident for incident in incidents if 0 <= incident.verdict - fault["time"] <= ATTRIBUTION_S]
    return bool(after) and fault["rank"] in min(after, key=lambda incident: incident.verdict).culprit.ranks


def _step_times(run: Path) -> Iterator[float]:
    for line in (run / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        if "step_time_s" in (record := json.loads(line)):
            yield record["step_time_s"]
