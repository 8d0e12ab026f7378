"""The report of a start: each part's time on its slowest rank, in the log and in the event store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megascale.record.start_parts import StartPart
from megascale.train.run import Hook

if TYPE_CHECKING:
    from megascale.train.reporter import Reporter
    from megascale.train.run import Run, StepResult

PREFIX = "start: "  # prefix of the names of the parts in the event store

NAMES = {"load": "checkpoint", "data": "first batch", "step": "first step"}
"""The names of parts in the report that differ from those of phases."""

MIN_REPORTED_S = 0.01

PartTotals = Mapping[str, Sequence[float]]
"""Seconds, requests and polls of a rank, by part."""


class StartReport(Hook):
    """Reports this process's start after its first step."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._done = False

    def step_ends(self, run: Run, result: StepResult) -> None:
        if self._done:
            return
        self._done = True
        parts = run.mesh.recorder.log.start_parts.end()
        for part in parts:  # activities of the host outside of steps
            name = PREFIX + NAMES.get(part.name, part.name)
            run.mesh.recorder.log.write_activity(name, 0, part.begun, part.ended, 0.0)
        by_rank = run.mesh.world.control.gather(sum_parts(parts), "start")
        if by_rank is not None:
            self._reporter.write_message(describe_start(by_rank))


def sum_parts(parts: Sequence[StartPart]) -> dict[str, list[float]]:
    """Return seconds, requests and polls by part; a part may have begun several times."""
    totals: dict[str, list[float]] = {}
    for part in parts:
        total = totals.setdefault(NAMES.get(part.name, part.name), [0.0, 0, 0])
        for place, number in enumerate((part.seconds, part.requests, part.polls)):
            total[place] += number
    return totals


def describe_start(by_rank: Sequence[PartTotals]) -> str:
    """Describe a start in a line: the slowest rank as a whole, and for each part, in the order of their beginning."""
    names = list(dict.fromkeys(name for parts in by_rank for name in parts))
    many = len(by_rank) > 1

    def slowest(seconds: Sequence[float]) -> str:
        most = max(seconds)
        return f"{most:.2f} s{f' (rank {list(seconds).index(most)})' if many else ''}"

    times = {name: [parts[name][0] if name in parts else 0.0 for parts in by_rank] for name in names}
    whole = [sum(seconds[0] for seconds in parts.values()) for parts in by_rank]
    listed = ", ".join(f"{name} {slowest(times[name])}" for name in names if max(times[name]) >= MIN_REPORTED_S)
    text = f"start: {slowest(whole)} to the end of the first step: {listed}"
    if not many:
        return text
    requests = [round(sum(part[1] for part in parts.values())) for parts in by_rank]
    most = max(requests[1:])
    return f"{text}; {requests[0]} requests of rank 0 to the job's store, at most {most} of another rank"
