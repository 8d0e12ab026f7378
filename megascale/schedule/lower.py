"""Lowering: adds sends, receives, weight all-gathers and gradient reductions to a compute schedule.

    1F1B, p = 2, m = 2, rank 0   F0 F1 B0 B1
    lowered                      WAIT_PARAMS F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1 REDUCE

The sender of a message places its receive: `global_order` is one order of the actions of all ranks; each action is
followed by the send of its result, and this send is followed by its receive. The list of a rank is its part of the
global order. Receives of a channel, an ordered pair of ranks, therefore come in the order of its sends, and messages
need no tags or handshakes. An exchange of all ranks has one place in the global order (`schedule.vocabulary`).

On a GPU a posted receive is a kernel that runs until its message arrives, and a send is a kernel that runs until its
receive is posted. A host that waits for its device (to load a kernel, free cached memory, or tune a kernel) waits for
both. Whatever ranks wait, and wherever, the earliest event of the global order that has not ended can end, as a send
and its receive are one event: no waits deadlock, and neither do kernels that share a hardware queue (Charron-Bost,
Mattern and Tel 1996). torch's pipelining places receives alike.
"""

from __future__ import annotations

from megascale.layout.stages import Placement
from megascale.schedule.dependencies import RESULTS, Result, dependencies, neighbours, results
from megascale.schedule.ir import Action, Kind, Schedule, ScheduleError
from megascale.schedule.vocabulary import Exchanges

ACTION, MESSAGE = 5, 1
"""Ticks of an action and of a message on the clock of `global_order`. As messages take time, ranks fall behind their
senders: the action before a message's consumer starts after the sender's action, and the receive is posted before it,
to overlap with it. Were messages to take no time, many receives would be posted directly before their consumers.
"""


def lower(compute: Schedule, placement: Placement, *, training: bool = True, reduce_each: bool = False) -> Schedule:
    """Add communication to a compute schedule. `training`: add REDUCE after the last gradients of a chunk's weights, or
    after all of them with `reduce_each`.

    Raises: ScheduleError if the ranks wait for each other
    """
    exchanges = Exchanges(placement, 1 + max(a.microbatch for order in compute for a in order), training)
    lowered = [exchanges.at_the_start for _ in compute]
    last = [{a.chunk: a.microbatch for a in order if Kind.W in RESULTS[a.kind]} for order in compute]
    gathered = set[tuple[int, int]]()
    for rank, action in global_order(compute, placement):
        order, (kind, chunk, microbatch) = lowered[rank], action
        if kind is Kind.F and (rank, chunk) not in gathered:
            gathered.add((rank, chunk))
            order.append(Action(Kind.WAIT_PARAMS, chunk, microbatch))
        order.append(action)
        if (target := neighbours(action, rank, placement).target) is not None:
            send, receive = (Kind.SEND_F, Kind.RECV_F) if kind is Kind.F else (Kind.SEND_B, Kind.RECV_B)
            receiver, its_chunk = placement.places[target]
            order.append(Action(send, chunk, microbatch))
            lowered[receiver].append(Action(receive, its_chunk, microbatch))
        if training and Kind.W in RESULTS[kind] and (reduce_each or last[rank][chunk] == microbatch):
            order.append(Action(Kind.REDUCE, chunk, microbatch))
        joint = exchanges.after(action, placement.stage(rank, chunk))
        for own in lowered if joint else ():
            own.extend(joint)
    return [[*own, *exchanges.at_the_end] for own in lowered]


def global_order(compute: Schedule, placement: Placement) -> list[tuple[int, Action]]:
    """Order the actions of all ranks, with their ranks, by their starts on a clock; at equal times by rank.

    Raises: ScheduleError if the ranks wait for each other
    """
    left, clock = [order[::-1] for order in compute], [0] * len(compute)
    ends, starts = dict[Result, int](), list[tuple[int, int, Action]]()
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(left):
            while order:
                needs = dependencies(order[-1], rank, placement)
                if not all(need in ends for need in needs):
                    break
                arrivals = [ends[need] + MESSAGE * (placement.rank(need[1]) != rank) for need in needs]
                start, action = max([clock[rank], *arrivals]), order.pop()
                clock[rank] = start + ACTION
                ends.update(dict.fromkeys(results(action, rank, placement), clock[rank]))
                starts.append((start, rank, action))
                progress = True
    if any(left):
        stuck = ", ".join(f"rank {rank} at {order[-1]}" for rank, order in enumerate(left) if order)
        raise ScheduleError(f"the schedule deadlocks: {stuck}")
    return [(rank, action) for _, rank, action in sorted(starts, key=lambda start: start[:2])]
