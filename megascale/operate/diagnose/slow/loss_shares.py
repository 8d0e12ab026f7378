"""The loss of a job's steps, shared out among its suspects.

How much was lost is measured (`slow.step_levels`); the model (`slow.job_cost`) says which suspect lost more, and
`divide` shares it out. Where there are no steps before the onset, the model's seconds are all that is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megascale.operate.diagnose.slow.finding import SlowCause
from megascale.operate.diagnose.slow.step_cube import Booleans, Floats, StepCube
from megascale.operate.diagnose.slow.step_levels import MIN_EXPLAINED, StepLevels, Stretch

MIN_COST_SHARE = 0.005
"""Smallest share of a step that a cause costs to be named."""

MIN_COST_NOISE = 2.0
"""Smallest cost of a cause, in deviations of the mean of a block of the run's like steps: below, it is noise."""

MIN_CROWDED_SHARE, MIN_UNMEASURED_SHARE = 0.25, 0.5
"""Smallest cost of a cause that names ranks which share their host's cores, as a share of the job's own steps before,
and without such steps, of a step; also of ranks without peers. What ranks take from each other is smaller.
"""

MIN_LASTING = 0.5
"""Share of its cost that a cause costs as long as it lasts."""


def lasting(cube: StepCube, levels: StepLevels, suspect: SlowCause) -> SlowCause:
    """Return a suspect that is also seen in the stretches next to those in which it shows, as long as it costs
    MIN_LASTING of what it does there: a short stretch, or one without messages in the store, does not show it.
    """
    costs = [_mean(suspect.seconds, cube.within(stretch[:2])) for stretch in levels.stretches]
    seen, numbers = set(suspect.seen), range(len(costs))
    for before, number in (*itertools.pairwise(numbers), *itertools.pairwise(reversed(numbers))):
        if before in seen and costs[number] >= max(MIN_LASTING * costs[before], 1e-12):
            seen.add(number)
    return replace(suspect, seen=frozenset(seen))


class Share(NamedTuple):
    """The seconds of a step that a cause cost in a stretch."""

    stretch: Stretch
    cost_s: float


def is_large(costs: Sequence[Share], noise_s: float, *, crowded: bool, has_peers: bool = True) -> bool:
    """Return True if a cause costs enough to be named. `crowded`: it names ranks that share cores; `has_peers`: others
    that do the same do not lose as much.
    """
    cost_s = mean_cost(costs)
    step_s = float(np.mean([each.seconds if each.usual_s is None else each.usual_s for each, _ in costs]))
    least = MIN_COST_SHARE
    if crowded:
        measured = has_peers and all(each.usual_s is not None for each, _ in costs)
        least = MIN_CROWDED_SHARE if measured else MIN_UNMEASURED_SHARE
    return cost_s >= max(least * step_s, MIN_COST_NOISE * noise_s)


def mean_cost(costs: Sequence[Share]) -> float:
    """Return the mean seconds of a step over the stretches of a cause."""
    weights = [stretch.last - stretch.first + 1 for stretch, _ in costs]
    return float(np.average([cost_s for _, cost_s in costs], weights=weights))


def divide(cube: StepCube, levels: StepLevels, suspects: Sequence[SlowCause]) -> tuple[list[list[Share]], list[Share]]:
    """Divide what was lost: return the shares of each suspect, in the stretches in which it shows, and what is left.

    A suspect costs what it did in the usual steps, if it showed there, and its part of the loss since then, in
    proportion to what grew by the model. Without usual steps it costs what the model says, at most the step.
    """
    shares: list[list[Share]] = [[] for _ in suspects]
    rest: list[Share] = []
    for number, stretch in enumerate(levels.stretches):
        now, before = (cube.within(ends) for ends in (stretch[:2], stretch.usual))
        here = [at for at, suspect in enumerate(suspects) if number in suspect.seen]
        old = {at: _mean(suspects[at].seconds, before) for at in here}
        grown = {at: max(0.0, _mean(suspects[at].seconds, now) - old[at]) for at in here}
        whole, most = sum(grown.values()), stretch.seconds if stretch.usual_s is None else stretch.lost_s
        least = MIN_EXPLAINED * most if stretch.usual_s is not None else 0.0
        scale = most / whole if whole > most or (whole >= least and stretch.usual_s is not None and whole) else 1.0
        for at in here:
            earlier = (levels.stretches[one].last for one in suspects[at].seen)
            lasts = any(stretch.usual[0] <= last <= stretch.usual[1] for last in earlier)
            shares[at].append(Share(stretch, scale * grown[at] + (max(0.0, old[at]) if lasts else 0.0)))
        rest.append(Share(stretch, max(0.0, stretch.lost_s - scale * whole)))
    return shares, rest


def _mean(seconds: Floats, steps: Booleans) -> float:
    return float(seconds[steps].mean()) if steps.any() else 0.0
