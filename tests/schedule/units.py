"""Cost of a compute schedule in unit times: bubble and live micro-batches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from megascale.schedule.check import ScheduleError, dependencies
from megascale.schedule.ir import Action, Kind, Schedule


@dataclass(frozen=True)
class ScheduleCost:
    """`time`: until the last rank is done. `bubble`: idle time over compute time of the busiest rank. `max_live`: by
    rank, the largest number of (chunk, micro-batch) pairs between their forward and their backward.
    """

    time: float
    bubble: float
    max_live: tuple[int, ...]


def simulate_schedule(schedule: Schedule, v: int, f: float = 1.0, b: float = 2.0) -> ScheduleCost:
    """Simulate a compute schedule: a forward takes `f` units, a backward `b`, a message no time.

    Raises: ScheduleError on a deadlock, naming the action at which every rank waits
    """
    p = len(schedule)
    done: dict[tuple[Kind, int, int], float] = {}  # (kind, virtual stage, micro-batch) -> time it ended
    clock, queues = [0.0] * p, [deque(order) for order in schedule]
    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(queues):
            while queue:
                action = queue[0]
                inputs = dependencies(action, rank, p, v)
                if not all(need in done for need in inputs):
                    break
                start = max([clock[rank], *(done[need] for need in inputs)])
                clock[rank] = start + (f if action.kind is Kind.F else b)
                done[action.kind, action.chunk * p + rank, action.microbatch] = clock[rank]
                queue.popleft()
                progress = True
    if any(queues):
        waiting = ", ".join(f"rank {rank} at {queue[0]}" for rank, queue in enumerate(queues) if queue)
        raise ScheduleError(f"deadlock: {waiting}")
    busy = [sum(f if a.kind is Kind.F else b for a in order) for order in schedule]
    time = max(clock)
    return ScheduleCost(time, (time - max(busy)) / max(busy), tuple(_live(order) for order in schedule))


def _live(order: list[Action]) -> int:
    max_live = live = 0
    for action in order:
        live += {Kind.F: 1, Kind.B: -1}.get(action.kind, 0)
        max_live = max(max_live, live)
    return max_live
