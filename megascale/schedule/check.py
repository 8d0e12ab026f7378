"""Check of a compute schedule, such as another package's, before it runs."""

from __future__ import annotations

from megascale.layout.stages import Placement
from megascale.schedule.ir import Action, Kind, Schedule, ScheduleError
from megascale.schedule.lower import global_order

PASSES = ((Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W))
"""The actions of a chunk and a micro-batch in their order, recomputations aside."""


def check_schedule(compute: Schedule, placement: Placement, m: int) -> None:
    """Check that every rank runs every (chunk, micro-batch) forward, then backward, in one action or two; and that no
    ranks wait for each other.

    Raises: ScheduleError
    """
    expected = {(chunk, i) for chunk in range(placement.v) for i in range(m)}
    for rank, order in enumerate(compute):
        kinds: dict[tuple[int, int], tuple[Kind, ...]] = dict.fromkeys(expected, ())
        for action in order:
            key = action.chunk, action.microbatch
            if key not in expected:
                raise ScheduleError(f"rank {rank}: {action} is none of {placement.v} chunks and {m} micro-batches")
            kinds[key] += () if action.kind is Kind.R else (action.kind,)
        for (chunk, i), found in kinds.items():
            if found not in PASSES:
                actions = " ".join(str(Action(kind, chunk, i)) for kind in found) or "nothing"
                raise ScheduleError(f"rank {rank} runs {actions} for chunk {chunk} and micro-batch {i}, not F, then B")
    global_order(compute, placement)
