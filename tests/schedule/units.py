"""Cost of a compute schedule in unit times: bubble and live micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from megascale.layout.stages import Placement
from megascale.plan.simulate.event_simulator import StageTimes, simulate
from megascale.plan.simulate.profiles import Overlaps
from megascale.schedule.ir import Action, Kind, Schedule


@dataclass(frozen=True)
class ScheduleCost:
    """`time`: until the last rank is done. `bubble`: idle time over compute time of the busiest rank. `max_live`: by
    rank, the largest number of (chunk, micro-batch) pairs between their forward and their last gradients.
    """

    time: float
    bubble: float
    max_live: tuple[int, ...]


def unit_times(placement: Placement, f: float = 1.0, b: float = 2.0, w: float = 1.0) -> StageTimes:
    """A forward takes `f` units, a backward `b`, of which `w` for the weights' gradients; all else takes no time."""
    forward, backward, weights = (dict.fromkeys(placement.places, taken) for taken in (f, b, w))
    return StageTimes(forward, backward, 0.0, 0.0, {}, {}, weight_gradient=weights)


def simulate_schedule(schedule: Schedule, placement: Placement) -> ScheduleCost:
    """Simulate a compute schedule in unit times.

    Raises: ScheduleError on a deadlock
    """
    times = unit_times(placement)
    last = simulate(schedule, placement, times, Overlaps(tp="none", pp=True, dp=True)).last
    busy = max(sum(times.seconds(a.kind, (rank, a.chunk)) for a in order) for rank, order in enumerate(schedule))
    return ScheduleCost(last, (last - busy) / busy, tuple(_live(order) for order in schedule))


def _live(order: list[Action]) -> int:
    max_live = live = 0
    for action in order:
        live += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(action.kind, 0)
        max_live = max(max_live, live)
    return max_live
