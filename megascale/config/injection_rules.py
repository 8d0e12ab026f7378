"""Rules of injected faults (`fault.inject`): a test that injects nothing would look like one that was passed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megascale.config.finding import Finding, Rule
from megascale.config.injection import parse_injection
from megascale.config.run import model_parallel_size

KEY = "fault.inject"


def injected_faults(c: Any) -> Iterator[Finding]:
    """Check that the faults are those of ranks, which alone a run injects, and strike in steps that it has."""
    steps = c.train.steps
    for fault in parse_injection(c.fault.inject).faults:
        if fault.target != "rank":
            message = f"{fault.kind} is a fault of the {fault.target}, and a run injects only faults of its ranks"
            yield Finding(KEY, message, "a fault of a rank; `python tools/lab faults` injects others from outside")
        elif fault.step > steps:
            yield Finding(KEY, f"there is no step {fault.step} for {fault.kind}", f"a step from 1 to {steps}")


def layout_ranks(c: Any) -> Iterator[Finding]:
    """Check the ranks of faults in a layout that gives the number of processes."""
    if isinstance(c.parallel.dp, int):
        yield from unknown_ranks(c, model_parallel_size(c.parallel) * c.parallel.dp)


def unknown_ranks(c: Any, world_size: int) -> Iterator[Finding]:
    """Check that a job of `world_size` processes has the ranks of its faults."""
    for fault in parse_injection(c.fault.inject).faults:
        if fault.rank is not None and fault.rank >= world_size:
            ranks = f"a rank from 0 to {world_size - 1}" if world_size > 1 else "rank 0, the only one"
            yield Finding(KEY, f"there is no rank {fault.rank} for {fault.kind}", ranks)


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("fault", "train"), injected_faults),
    (("fault", "parallel"), layout_ranks),
)
"""(sections that the rule reads, rule), as in `rules`."""
