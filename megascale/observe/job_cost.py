"""The seconds of a step that slow ranks cost the job: the modelled step with their excess, less the step without it.

The job waits for the slowest rank of each synchronized group. A tensor-parallel group takes as long as its slowest
rank, and a step as long as the slowest replica, which first reads its data. The pipeline of a replica is modelled as
1F1B, by the stage i that ends last: with t_j seconds of stage j for one of m micro-batches, a third of them forward,

    sum of t_j before i  +  m t_i  +  max(0, sum of t_j after i - (p - 1 - i) t_i / 3)

A pause for garbage collection delays its replica by its whole length: stages are a few micro-batches apart at most.
Pauses of several stages add up, those of a tensor-parallel group count once.

Without one of two equally slow ranks the job is as slow as before: costs of single culprits do not add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from megascale.layout.topology import DATA_AXES
from megascale.observe.step_cube import Booleans, Floats, Integers, StepCube

FORWARD_SHARE = 1 / 3
"""Share of the forward in a micro-batch's compute."""


class Excess(NamedTuple):
    """The time that some ranks, given by position, lose in each step: `seconds` [ranks, S], in compute or on the host,
    in reading data, or in pauses.
    """

    ranks: Integers
    seconds: Floats
    part: Literal["compute", "data", "gc"] = "compute"


def job_costs(cube: StepCube, culprits: Mapping[str, Excess], steps: Booleans | None = None) -> dict[str, float]:
    """Return by culprit the mean seconds of a step that its excess costs the job. `steps` [S]: the steps that count, by
    default those that are ordinary on some rank.
    """
    steps = cube.ordinary_steps if steps is None else steps
    parts = {"compute": cube.compute + cube.other, "data": cube.data, "gc": cube.gc}
    parts = {name: seconds[:, steps] for name, seconds in parts.items()}
    stages = _Stages.from_cube(cube)
    seconds = stages.replica_seconds(**parts)
    costs = dict.fromkeys(culprits, 0.0)
    for name, excess in culprits.items() if steps.any() else ():
        affected = np.isin(stages.replica, stages.replica[excess.ranks])
        better = {part: values[affected] for part, values in parts.items()}
        better[excess.part][(np.cumsum(affected) - 1)[excess.ranks]] -= excess.seconds[:, steps]
        after = stages.take(affected).replica_seconds(**better).max(0)
        others = np.delete(seconds, np.unique(stages.replica[excess.ranks]), 0).max(0, initial=0.0)
        costs[name] = float((seconds.max(0) - np.maximum(others, after)).mean())
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

    def replica_seconds(self, compute: Floats, data: Floats, gc: Floats) -> Floats:
        """Return the seconds of the replicas, [replicas, S]."""
        order = np.lexsort((self.stage, self.replica))
        stage, number = self.stage[order], np.unique(self.replica[order], return_inverse=True)[1]
        firsts = np.flatnonzero(np.append(True, (stage[1:] != stage[:-1]) | (number[1:] != number[:-1])))
        slowest, reading, pauses = (np.maximum.reduceat(values[order], firsts) for values in (compute, data, gc))
        p = int(stage.max()) + 1
        place = number[firsts], stage[firsts]
        stages, first = (
            np.zeros((number.max() + 1, p, compute.shape[1])),
            np.zeros((number.max() + 1, compute.shape[1])),
        )
        stages[place] = slowest
        first[place[0][place[1] == 0]] = reading[place[1] == 0]
        one = stages / self.forwards
        before, after = np.cumsum(one, 1) - one, one.sum(1, keepdims=True) - np.cumsum(one, 1)
        warm_up = np.arange(p - 1, -1, -1)[:, None] * one * FORWARD_SHARE
        paused = np.zeros_like(first)
        np.add.at(paused, number[firsts], pauses)
        return np.asarray((before + stages + np.maximum(0.0, after - warm_up)).max(1) + first + paused)
