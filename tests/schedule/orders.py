"""Compute schedules for tests: the catalog's, and random orders on any placement."""

from __future__ import annotations

import random

from megascale.catalog.schedules import SCHEDULES
from megascale.layout.stages import Placement, placement_of
from megascale.schedule.dependencies import Result, dependencies, results
from megascale.schedule.ir import Action, Kind, Schedule, build_schedule


def schedule_of(name: str, p: int, v: int, m: int) -> tuple[Schedule, Placement]:
    """Build a compute schedule, with as many chunks as it has if that is one number."""
    facts = SCHEDULES[name].facts
    placement = placement_of(name, p, facts["v"] or v)
    return build_schedule(SCHEDULES[name].load(), p, placement.v, m), placement


def any_order(
    placement: Placement, m: int, chance: random.Random, *, split: bool = False, ascending: bool = False
) -> Schedule:
    """Draw a random compute schedule: pick any action whose dependencies are done. `ascending`: sum the gradients of
    weights in the order of the micro-batches.
    """
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    schedule: Schedule = [[] for _ in range(placement.p)]
    done = set[Result]()
    remaining = [
        (rank, Action(kind, chunk, i))
        for rank, chunk in placement.places
        for kind in kinds
        for i in range(m)
    ]  # fmt: skip
    while remaining:
        ready = [each for each in remaining if done.issuperset(dependencies(each[1], each[0], placement))]
        if ascending:
            first = {(rank, action._replace(microbatch=0)): action for rank, action in reversed(remaining)}
            ready = [
                (rank, a)
                for rank, a in ready
                if a.kind not in (Kind.B, Kind.W) or a == first[rank, a._replace(microbatch=0)]
            ]
        rank, action = picked = chance.choice(ready)
        remaining.remove(picked)
        schedule[rank].append(action)
        done.update(results(action, rank, placement))
    return schedule
