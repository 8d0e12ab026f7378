"""A layout that a search found, and what it loses against another."""

from __future__ import annotations

from dataclasses import dataclass

from megascale.config.run import RunConfig
from megascale.core.units import format_bytes
from megascale.plan.estimate import Estimate
from megascale.plan.layouts import Layout
from megascale.plan.memory import RankBytes


@dataclass(frozen=True)
class Candidate:
    """A layout with its resolved configuration, the bytes of its fullest rank, its step, whose replay may be without
    spans, and `lost`: why it is not the first, in a few words; empty for the first.
    """

    layout: Layout
    config: RunConfig
    memory: RankBytes
    estimate: Estimate
    lost: str = ""


TOLD = 0.2
"""A cause is told that has this part of all that a layout loses."""

ALIKE = 5e-4
"""The part of a step's time by which steps are as fast."""


def lost(candidate: Candidate, first: Candidate) -> str:
    """What a candidate loses against the first, by cause; or that it is as fast and larger."""
    one, other = candidate.estimate, first.estimate
    more = {cause: seconds - other.causes[cause] for cause, seconds in one.causes.items()}
    if one.step_s - other.step_s <= ALIKE * other.step_s:
        larger = candidate.memory.total - first.memory.total
        return f"as fast, {'+' if larger >= 0 else '-'}{format_bytes(abs(larger))}"
    worse = sorted(((seconds, cause) for cause, seconds in more.items() if seconds > 0), reverse=True)
    told = [each for each in worse if each[0] >= TOLD * sum(seconds for seconds, _ in worse)] or worse[:1]
    return ", ".join(f"{cause} +{seconds:.2g} s" for seconds, cause in told)
