"""Cost of a compute schedule in unit times: bubble and live micro-batches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from megascale.layout.stages import Placement
from megascale.plan.simulate.event_simulator import StageTimes, simulate
from megascale.plan.simulate.profiles import Overlaps
from megascale.schedule.ir import Kind, RankSchedule, Schedule, each_action


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


def simulate_schedule(
    schedule: Schedule, placement: Placement, pair: float = 1.0, message: float = 0.0
) -> ScheduleCost:
    """Simulate a compute schedule in unit times. `pair`: time of an Overlap relative to its parts; `message`: of a
    message.

    Raises: ScheduleError on a deadlock
    """
    pairs = itertools.product(range(placement.p), range(placement.v), range(placement.v))
    hidden = dict.fromkeys(pairs, (1 - pair) * 3.0)
    times = replace(unit_times(placement), hidden=hidden, message=message)
    last = simulate(schedule, placement, times, Overlaps(tp="none", pp=True, dp=True)).last
    busy = max(
        sum(times.seconds(a.kind, (rank, a.chunk)) for a in each_action(order)) for rank, order in enumerate(schedule)
    )
    return ScheduleCost(last, (last - busy) / busy, tuple(_live(order) for order in schedule))


def _live(order: RankSchedule) -> int:
    max_live = live = 0
    for action in each_action(order):
        live += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(action.kind, 0)
        max_live = max(max_live, live)
    return max_live
