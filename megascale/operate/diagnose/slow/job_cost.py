"""The seconds of a step that slow ranks cost the job: the modelled step with their excess, less the step without any.

The job waits for the slowest rank of each synchronized group. A tensor-parallel group takes as long as its slowest
rank, and a step as long as the slowest replica, and then the slowest rank's optimizer. The pipeline of a replica is
modelled as 1F1B, by the stage i that ends last: with t_j seconds of stage j for one of m micro-batches, a third of them
forward, and a start s_i, when its data is there and the stages before it have begun,

    s_i  +  m t_i  +  max(0, sum of t_j after i - (p - 1 - i) t_i / 3),    s_i = max(data_i, s_{i-1} + t_{i-1})

A pause for garbage collection delays its replica by its whole length: stages are a few micro-batches apart at most.
Pauses of several stages add up, those of a tensor-parallel group count once.

The model says which of several causes lost more, each as if it were the only one: without one of two equally slow ranks
the job would be as slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from megascale.layout.topology import DATA_AXES
from megascale.operate.diagnose.slow.peers import Groups
from megascale.operate.diagnose.slow.step_cube import Floats, Integers, StepCube
from megascale.record.events import COMPUTE, OPTIMIZER_ACTIONS

FORWARD_SHARE = 1 / 3  # share of the forward in a micro-batch's compute

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


def job_costs(cube: StepCube, causes: Sequence[Excess]) -> list[Floats]:
    """Return the seconds that each excess costs the job in each step, if it were the only one, [S]."""
    parts = times_of(cube)
    parts["compute"] = parts["compute"] + cube.other
    for excess in causes:
        for part, more in excess.seconds.items():
            parts[part][excess.ranks] -= more
    replica = np.unique(cube.places.codes(*DATA_AXES), return_inverse=True)[1]
    stage, forwards = cube.places.coords["pp"], max(1, cube.forwards)
    seconds = _replica_seconds(parts, replica, stage, forwards) if causes else np.zeros(0)
    costs = []
    for excess in causes:
        affected = np.isin(replica, replica[excess.ranks])
        slower = {part: values[affected] for part, values in parts.items()}
        for part, more in excess.seconds.items():
            slower[part][(np.cumsum(affected) - 1)[excess.ranks]] += more
        others = np.delete(seconds, np.unique(replica[excess.ranks]), 0).max(0, initial=0.0)
        mine = _replica_seconds(slower, replica[affected], stage[affected], forwards).max(0)
        passes = np.maximum(others, mine) - seconds.max(0)
        ends = parts["optimizer"][~affected].max(0, initial=0.0)
        costs.append(passes + np.maximum(ends, slower["optimizer"].max(0)) - parts["optimizer"].max(0))
    return costs


def _replica_seconds(parts: Mapping[Model, Floats], replica: Integers, stage: Integers, forwards: int) -> Floats:
    """Return the seconds of the replicas up to the optimizer, [replicas, S]. `replica`, `stage` [R]: of the ranks.
    `forwards`: of a rank in a step.
    """
    replicas, number = np.unique(replica, return_inverse=True)
    p = int(stage.max()) + 1
    groups = Groups.of(number * p + stage)
    stages, data, paused = np.zeros((3, len(replicas), p, parts["compute"].shape[1]))
    at = groups.order[groups.starts]
    for values, part in ((stages, parts["compute"]), (data, parts["data"]), (paused, parts["gc"])):
        values[number[at], stage[at]] = groups.reduce(np.maximum, part)
    one, start = stages / forwards, data
    for late in range(1, p):
        start[:, late] = np.maximum(data[:, late], start[:, late - 1] + one[:, late - 1])
    after = one.sum(1, keepdims=True) - np.cumsum(one, 1)
    warm_up = np.arange(p - 1, -1, -1)[:, None] * one * FORWARD_SHARE
    return np.asarray((start + stages + np.maximum(0.0, after - warm_up)).max(1) + paused.sum(1))
