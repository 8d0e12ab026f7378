"""One order of the actions of all ranks, by their starts on a clock. Messages in this order cannot deadlock
(`schedule.lower`).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence

from megascale.layout.stages import Placement
from megascale.schedule.dependencies import Result, dependencies, results
from megascale.schedule.ir import Entry, Kind, RankSchedule, ScheduleError, parts

ACTION, MESSAGE = 5, 1
"""Ticks of an action and of a message on the clock of `global_order`. As messages take time, ranks fall behind their
senders: the action before a message's consumer starts after the sender's action, and the receive is posted before it,
to overlap with it. Were messages to take no time, many receives would be posted directly before their consumers.
"""

TICKS = {Kind.B: 2 * ACTION, Kind.VS: 1, Kind.VT: 1}
"""Ticks with vocabulary parallelism, of other actions ACTION: the passes get the places that they have in time. On a
clock where a backward takes no longer than a forward, steps would be up to a quarter longer.
"""


def global_order(
    lists: Sequence[Sequence[RankSchedule]], placement: Placement
) -> list[tuple[int, Entry, list[Result]]]:
    """Run lists of entries of every rank on a clock, each list in its order; the first of a rank's lists with an entry
    that can start at a time starts it. Return the entries by their starts, at equal times by rank, each with its rank
    before it and with the results that it leaves.

    Raises: ScheduleError if the ranks wait for each other
    """
    ticks = defaultdict(lambda: ACTION, TICKS if placement.barriers else {})
    left = [[order[::-1] for order in own] for own in lists]
    ends, clock, order = dict[Result, int](), [0 for _ in left], list[tuple[int, Entry, list[Result]]]()
    waiting = defaultdict[Result, set[int]](set)  # the ranks that wait for a result
    passed = Counter[Result]()  # ranks that have run a pass over their rows of the vocabulary
    ready, version = list[tuple[int, int, int, int]](), [0 for _ in left]  # starts, ranks with versions, lists

    def consider(rank: int) -> None:
        version[rank] += 1
        for at, own in enumerate(left[rank]):
            needs = dependencies(own[-1], rank, placement) if own else []
            missing = next((need for need in needs if need not in ends), None)
            if missing is not None:
                waiting[missing].add(rank)
            elif own:
                arrivals = (ends[need] + MESSAGE * (need[1] not in placement.stages[rank]) for need in needs)
                heapq.heappush(ready, (max([clock[rank], *arrivals]), rank, at, version[rank]))

    for rank in range(len(left)):
        consider(rank)
    while ready:
        start, rank, at, known = heapq.heappop(ready)
        if known != version[rank]:
            continue  # the rank has run an entry since, or can run another
        entry = left[rank][at].pop()
        clock[rank] = start + sum(ticks[kind] for kind, *_ in parts(entry))
        made = results(entry, rank, placement)
        if made[0][1] == placement.count:
            passed.update(made)
            made = made if passed[made[0]] == placement.p else []
        order.append((rank, entry, made))
        ends.update(dict.fromkeys(made, clock[rank]))
        for other in {rank}.union(*(waiting.pop(result, ()) for result in made)):
            consider(other)
    _check_done(left)
    return order


def _check_done(left: Sequence[Sequence[RankSchedule]]) -> None:
    if stuck := [f"rank {rank} at {own[-1]}" for rank, lists in enumerate(left) for own in lists if own]:
        raise ScheduleError(f"the schedule deadlocks: {', '.join(stuck)}")
