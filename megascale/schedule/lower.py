"""Lowering: adds sends, receives, gathers of weights and reductions of gradients to a compute schedule.

    1F1B, p = 2, m = 2, rank 0   F0 F1 B0 B1
    lowered                      WAIT_PARAMS F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1 REDUCE

The sender of a message places its receive: `global_order` is one order of the actions of all ranks; each action is
followed by the send of its result, and this send is followed by its receive. The list of a rank is its part of the
global order. Receives of a channel, an ordered pair of ranks, therefore come in the order of its sends, and messages
need no tags or handshakes. Both messages of an Overlap are sent after it. An exchange of all ranks has one place in the
global order (`schedule.shared_vocabulary`).

On a GPU a posted receive is a kernel that runs until its message arrives, and a send is a kernel that runs until its
receive is posted. A host that waits for its device (to load a kernel, free cached memory, or tune a kernel) waits for
both. Whatever ranks wait, and wherever, the earliest event of the global order that has not ended can end, as a send
and its receive are one event: no waits deadlock, and neither do kernels that share a hardware queue (Charron-Bost,
Mattern and Tel 1996). torch's pipelining places receives alike.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import count

from megascale.catalog.schedules import SCHEDULES
from megascale.layout.stages import Placement
from megascale.schedule.dependencies import RESULTS, Result, dependencies, neighbours, results
from megascale.schedule.ir import (
    Action,
    Entry,
    Kind,
    RankSchedule,
    Schedule,
    ScheduleError,
    build_schedule,
    each_action,
    parts,
    weights_at_once,
)
from megascale.schedule.one_f_one_b import partial_1f1b
from megascale.schedule.resharding import Placed, Reshard, place_gathers
from megascale.schedule.shared_vocabulary import Exchanges, delay_backwards, microbatches

CACHED_ORDERS = 32  # schedules of a search's layouts
ACTION, MESSAGE = 5, 1
"""Ticks of an action and of a message on the clock of `global_order`. As messages take time, ranks fall behind their
senders: the action before a message's consumer starts after the sender's action, and the receive is posted before it,
to overlap with it. Were messages to take no time, many receives would be posted directly before their consumers.
"""

TICKS = {Kind.B: 2 * ACTION, Kind.VS: 1, Kind.VT: 1}
"""Ticks with vocabulary parallelism, of other actions ACTION: the passes get the places that they have in time. On a
clock where a backward takes no longer than a forward, steps would be up to a quarter longer.
"""


def lower(
    compute: Schedule, placement: Placement, *, training: bool = True, reduce_each: bool = False,
    reshard: Reshard | None = None,
) -> Schedule:  # fmt: skip
    """Add communication to a compute schedule. `training`: add REDUCE after the last gradients of a chunk's weights, or
    after all of them with `reduce_each`. `reshard`: when sharded weights are gathered and released.

    Raises: ScheduleError if the ranks wait for each other
    """
    exchanges = Exchanges(placement, microbatches(compute), training)
    lowered = [exchanges.at_the_start for _ in compute]
    last = [{a.chunk: a.microbatch for a in each_action(order) if Kind.W in RESULTS[a.kind]} for order in compute]
    gathered, numbers = set[tuple[int, int]](), [count() for _ in compute]
    placed = [place_gathers(order, reshard) if reshard else (Placed(list), Placed(list)) for order in compute]
    for rank, entry in global_order(compute, placement):
        order, actions, at, (before, after) = lowered[rank], parts(entry), next(numbers[rank]), placed[rank]
        order.extend(before[at])
        for kind, chunk, microbatch in actions:
            if kind is Kind.F and (reshard or (rank, chunk) not in gathered):
                gathered.add((rank, chunk))
                order.append(Action(Kind.WAIT_PARAMS, chunk, microbatch))
        order.append(entry)
        for action in actions:
            if (target := neighbours(action, rank, placement).target) is not None:
                send, receive = (Kind.SEND_F, Kind.RECV_F) if action.kind is Kind.F else (Kind.SEND_B, Kind.RECV_B)
                receiver, its_chunk = placement.places[target]
                order.append(action._replace(kind=send))
                lowered[receiver].append(Action(receive, its_chunk, action.microbatch))
        order.extend(after[at])
        for kind, chunk, microbatch in actions:
            if training and Kind.W in RESULTS[kind] and (reduce_each or last[rank][chunk] == microbatch):
                order.append(Action(Kind.REDUCE, chunk, microbatch))
        joint = [exchange for action in actions for exchange in exchanges.after(action, rank)]
        for own in lowered if joint else ():
            own.extend(joint)
    return [[*own, *exchanges.at_the_end] for own in lowered]


def with_passes(compute: Schedule, placement: Placement) -> Schedule:
    """Add VS and VT to a compute schedule of all ranks, each as soon as the rank is free and what it needs has arrived;
    without vocabulary parallelism return the schedule itself.

    Raises: ScheduleError if the ranks wait for each other
    """
    if not placement.barriers:
        return compute
    numbers, placed = range(microbatches(compute)), [RankSchedule() for _ in compute]
    passes: Schedule = [[Action(kind, placement.v, i) for i in numbers] for kind in (Kind.VT, Kind.VS)]
    for rank, entry in _clocked([[*passes, delay_backwards(own, placement.barriers)] for own in compute], placement):
        placed[rank].append(entry)
    return placed


@lru_cache(CACHED_ORDERS)
def compute_order(name: str, placement: Placement, m: int, joined: tuple[int, ...] = ()) -> Schedule:
    """Build the compute actions of all ranks in the schedule `name`, with m micro-batches. `joined`: chunks whose W
    follows its I at once.
    """
    if placement.skip_ratio:
        return [partial_1f1b(placement, m, rank) for rank in range(placement.p)]
    orders = build_schedule(SCHEDULES[name].load(), placement.p, placement.v, m)
    return with_passes([weights_at_once(order, joined) for order in orders], placement)


def global_order(compute: Schedule, placement: Placement) -> list[tuple[int, Entry]]:
    """Order the entries of all ranks, with their ranks, by their starts on a clock; at equal times by rank.

    Raises: ScheduleError if the ranks wait for each other
    """
    return _clocked([[order] for order in compute], placement)


def _clocked(lists: Sequence[Sequence[RankSchedule]], placement: Placement) -> list[tuple[int, Entry]]:
    """Run lists of entries of every rank on a clock, each list in its order; the first of a rank's lists with an entry
    that can start at a time starts it. Return the entries with their ranks by their starts, at equal times by rank.
    """
    ticks = defaultdict(lambda: ACTION, TICKS if placement.barriers else {})
    left = [[order[::-1] for order in own] for own in lists]
    ends, clock, order = dict[Result, int](), [0 for _ in left], list[tuple[int, Entry]]()
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
        order.append((rank, entry))
        clock[rank] = start + sum(ticks[kind] for kind, *_ in parts(entry))
        made = results(entry, rank, placement)
        if made[0][1] == placement.count:
            passed.update(made)
            made = made if passed[made[0]] == placement.p else []
        ends.update(dict.fromkeys(made, clock[rank]))
        for other in {rank}.union(*(waiting.pop(result, ()) for result in made)):
            consider(other)
    _check_done(left)
    return order


def _check_done(left: Sequence[Sequence[RankSchedule]]) -> None:
    stuck = [f"rank {rank} at {own[-1]}" for rank, lists in enumerate(left) for own in lists if own]
    if stuck:
        raise ScheduleError(f"the schedule deadlocks: {', '.join(stuck)}")
