"""The seconds of a step that slow ranks cost the job: the modelled step with their excess, less the step without any.

The job waits for the slowest rank of each synchronized group. A tensor-parallel group takes as long as its slowest
rank, and a step as long as the slowest replica, and then the slowest rank's optimizer. The pipeline of a replica is
modelled as 1F1B, by the stage i that ends last: with t_j seconds of stage j for one of m micro-batches, a third of them
forward, and a start s_i, when its data is there and the stages before it have begun,

    s_i  +  m t_i  +  max(0, sum of t_j after i - (p - 1 - i) t_i / 3),    s_i = max(data_i, s_{i-1} + t_{i-1})

A pause for garbage collection delays its replica by its whole length: stages are a few micro-batches apart at most.
Pauses of several stages add up, those of a tensor-parallel group count once.

The model says which of several causes lost more, each as if it were the only one: without one of two equally slow ranks
the job would be as slow. How much was lost is measured (`slow.step_levels`), and `divide` shares it out. Where there
are no steps before the onset, the model's seconds are all that is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from megascale.layout.topology import DATA_AXES
from megascale.operate.diagnose.slow.step_cube import Booleans, Floats, Integers, StepCube
from megascale.operate.diagnose.slow.step_levels import StepLevels, Stretch
from megascale.record.events import COMPUTE, OPTIMIZER_ACTIONS

FORWARD_SHARE = 1 / 3
"""Share of the forward in a micro-batch's compute."""

MIN_COST_SHARE = 0.005
"""Smallest share of a step that a cause costs to be named."""

MIN_REST_SHARE = 0.02
"""Smallest share of a step that is lost for no known cause, to be told, or to look for its cause."""

MIN_COST_NOISE = 2.0
"""Smallest cost of a cause, in deviations of the mean of a block of the run's like steps: below, it is noise."""

MIN_CROWDED_SHARE, MIN_UNMEASURED_SHARE = 0.25, 0.5
"""Smallest cost of a cause that names ranks which share their host's cores, as a share of the job's own steps before,
and without such steps, of a step; also of ranks without peers. What ranks take from each other is smaller.
"""

MIN_EXPLAINED = 1 / 3
"""Share of a loss from which on the causes that are known explain all of it: the model is not more exact, and a process
that is stopped now and then loses as much in waits, which are as long on its peers.
"""

MIN_LASTING = 0.5
"""Share of its cost that a cause costs as long as it lasts."""

ALL = "all ranks"

FindingKind = Literal["pause", "compute", "data", "host", "gc", "link", "communication", "job", "drift", "steps"]

Model = Literal["compute", "optimizer", "data", "gc"]


class Excess(NamedTuple):
    """The time that some ranks, given by position, lose in each step: `seconds` [ranks, S] by part of the model. What
    is lost on the host counts as compute.
    """

    ranks: Integers
    seconds: Mapping[Model, Floats]


def times_of(cube: StepCube) -> dict[Model, Floats]:
    """Return the times of the model, [R, S]. Pauses of the process are like those for garbage collection."""
    optimizer, gc = cube.own_of(COMPUTE, *OPTIMIZER_ACTIONS), cube.gc + cube.paused
    return {"compute": cube.compute - optimizer, "optimizer": optimizer, "data": cube.data.copy(), "gc": gc}


def job_costs(cube: StepCube, culprits: Mapping[str, Excess]) -> dict[str, Floats]:
    """Return by culprit the seconds that its excess costs the job in each step, if it were the only one, [S]."""
    parts = times_of(cube)
    parts["compute"] = parts["compute"] + cube.other
    for excess in culprits.values():
        for part, more in excess.seconds.items():
            parts[part][excess.ranks] -= more
    stages = _Stages.from_cube(cube)
    seconds = stages.replica_seconds(parts) if culprits else np.zeros(0)
    costs: dict[str, Floats] = {}
    for name, excess in culprits.items():
        affected = np.isin(stages.replica, stages.replica[excess.ranks])
        slower = {part: values[affected] for part, values in parts.items()}
        for part, more in excess.seconds.items():
            slower[part][(np.cumsum(affected) - 1)[excess.ranks]] += more
        others = np.delete(seconds, np.unique(stages.replica[excess.ranks]), 0).max(0, initial=0.0)
        passes = np.maximum(others, stages.take(affected).replica_seconds(slower).max(0)) - seconds.max(0)
        ends = parts["optimizer"][~affected].max(0, initial=0.0)
        costs[name] = passes + np.maximum(ends, slower["optimizer"].max(0)) - parts["optimizer"].max(0)
    return costs


class _Stages(NamedTuple):
    """The replica [R], from 0 on, and the pipeline stage [R] of ranks; `forwards` of a rank in a step."""

    replica: Integers
    stage: Integers
    forwards: int

    @classmethod
    def from_cube(cls, cube: StepCube) -> _Stages:
        replica = np.unique(cube.places.codes(*DATA_AXES), return_inverse=True)[1]
        return cls(replica, cube.places.coords["pp"], max(1, cube.forwards))

    def take(self, ranks: Booleans) -> _Stages:
        return self._replace(replica=self.replica[ranks], stage=self.stage[ranks])

    def replica_seconds(self, parts: Mapping[Model, Floats]) -> Floats:
        """Return the seconds of the replicas up to the optimizer, [replicas, S]."""
        order = np.lexsort((self.stage, self.replica))
        stage, number = self.stage[order], np.unique(self.replica[order], return_inverse=True)[1]
        firsts = np.flatnonzero(np.append(True, (stage[1:] != stage[:-1]) | (number[1:] != number[:-1])))
        slowest = [np.maximum.reduceat(parts[part][order], firsts) for part in ("compute", "data", "gc")]
        replicas, p = int(number.max()) + 1, int(stage.max()) + 1
        stages, data, paused = np.zeros((3, replicas, p, slowest[0].shape[1]))
        for values, of_part in zip((stages, data, paused), slowest, strict=True):
            values[number[firsts], stage[firsts]] = of_part
        one, start = stages / self.forwards, data
        for at in range(1, p):
            start[:, at] = np.maximum(data[:, at], start[:, at - 1] + one[:, at - 1])
        after = one.sum(1, keepdims=True) - np.cumsum(one, 1)
        warm_up = np.arange(p - 1, -1, -1)[:, None] * one * FORWARD_SHARE
        return np.asarray((start + stages + np.maximum(0.0, after - warm_up)).max(1) + paused.sum(1))


@dataclass(frozen=True)
class SlowCause:
    """A possible cause, and by how many `seconds` [S] the model says that it makes each step of a cube longer. `seen`:
    numbers of the stretches in which it shows. `culprit`: its name, and `ranks`, empty for all.
    """

    kind: FindingKind
    culprit: str
    ranks: tuple[int, ...]
    seconds: Floats
    seen: frozenset[int]
    evidence: tuple[str, ...]


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
