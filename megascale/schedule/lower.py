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

from functools import lru_cache, partial
from itertools import count

from megascale.catalog.schedules import SCHEDULES
from megascale.layout.stages import Placement
from megascale.schedule.check import as_problem, check_entries, check_schedule
from megascale.schedule.dependencies import RESULTS, neighbours
from megascale.schedule.global_order import global_order
from megascale.schedule.ir import (
    Action,
    Kind,
    RankSchedule,
    Schedule,
    build_schedule,
    each_action,
    parts,
    weights_at_once,
)
from megascale.schedule.one_f_one_b import partial_1f1b
from megascale.schedule.resharding import Placed, Reshard, place_gathers
from megascale.schedule.shared_vocabulary import delay_backwards, exchanges_after, microbatches
from megascale.schedule.state_aware import build_state_aware

CACHED_ORDERS, CACHED_RANKS = 32, 64  # layouts of a search often share the order of actions


def lower(
    compute: Schedule, placement: Placement, *, training: bool = True, reduce_each: bool = False,
    reshard: Reshard | None = None,
) -> Schedule:  # fmt: skip
    """Add communication to a compute schedule. `training`: add REDUCE after the last gradients of a chunk's weights, or
    after all of them with `reduce_each`. `reshard`: when sharded weights are gathered and released.

    Raises: ScheduleError if the ranks wait for each other
    """
    m = microbatches(compute)
    first = [Action(kind, placement.v, 0) for kind in (Kind.WAIT_PARAMS, Kind.EMBED) if placement.barriers]
    lowered: Schedule = [[*first] for _ in compute]
    last = [{a.chunk: a.microbatch for a in each_action(order) if Kind.W in RESULTS[a.kind]} for order in compute]
    gathered, numbers = set[tuple[int, int]](), [count() for _ in compute]
    placed = [place_gathers(order, reshard) if reshard else (Placed(list), Placed(list)) for order in compute]
    for rank, entry, made in global_order([[order] for order in compute], placement):
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
        joint = exchanges_after(made, placement, m, training=training)
        for own in lowered if joint else ():
            own.extend(joint)
    end = [Action(Kind.REDUCE, placement.v, m - 1)] if training and placement.barriers else []
    return [[*own, *end] for own in lowered]


def with_passes(compute: Schedule, placement: Placement) -> Schedule:
    """Add VS and VT to a compute schedule of all ranks, each as soon as the rank is free and what it needs has arrived;
    without vocabulary parallelism return the schedule itself.

    Raises: ScheduleError if the ranks wait for each other
    """
    if not placement.barriers:
        return compute
    numbers, placed = range(microbatches(compute)), [RankSchedule() for _ in compute]
    passes: Schedule = [[Action(kind, placement.v, i) for i in numbers] for kind in (Kind.VT, Kind.VS)]
    lists = [[*passes, delay_backwards(own, placement.barriers)] for own in compute]
    for rank, entry, _ in global_order(lists, placement):
        placed[rank].append(entry)
    return placed


@lru_cache(CACHED_ORDERS)
def compute_order(
    name: str, placement: Placement, m: int, joined: tuple[int, ...] = (), parts: int = 1, keep: int = 1
) -> Schedule:
    """Build the compute actions of all ranks in the schedule `name`, with m micro-batches; another package's is
    checked. `joined`: chunks whose W follows its I at once. `parts`: dependent micro-batches of a sequence, of which
    the last `keep` keep their activations.

    Raises: ConfigError
    """
    if parts > 1:
        return build_state_aware(placement.p, [parts] * (m // parts), keep)
    if placement.skip_ratio:
        return [partial_1f1b(placement, m, rank) for rank in range(placement.p)]
    orders, card = build_schedule(partial(order_of, name), placement.p, placement.v, m), SCHEDULES[name]
    if not card.built_in:
        with as_problem(name):
            check_schedule(orders, placement, m, card.facts)
    return with_passes([weights_at_once(order, joined) for order in orders], placement)


@lru_cache(CACHED_RANKS)
def order_of(name: str, p: int, v: int, m: int, rank: int) -> RankSchedule:
    """List the compute actions of a rank in the schedule `name`. Raises: ConfigError"""
    card = SCHEDULES[name]
    with as_problem(name):
        order: RankSchedule = card.load()(p, v, m, rank)
        if not card.built_in:
            check_entries(order, rank)
    return order
