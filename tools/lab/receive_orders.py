"""Orders of a pipeline's receives: those that `schedule.lower` is compared with."""

from __future__ import annotations

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from torch.distributed.pipelining import schedules as torch_schedules

from megascale.layout.stages import Placement
from megascale.schedule.dependencies import neighbours
from megascale.schedule.ir import COMPUTE_KINDS, SERVED, Action, Kind

RECEIVES = (Kind.RECV_F, Kind.RECV_B)

AHEAD = 2
"""Compute actions between a receive and its consumer, of receives that are posted ahead."""

Lists = list[list[Action]]
"""The actions of a lowered schedule by rank, none in pairs."""


def posted_ahead(order: list[Action], ahead: int = AHEAD) -> list[Action]:
    """Move every receive of a rank's list before the action that is `ahead` compute actions before its consumer."""
    work = {action: at for at, action in enumerate(each for each in order if each.kind in COMPUTE_KINDS)}
    actions, before = list(work), defaultdict[Action, list[Action]](list)
    consumer = {a: work[a._replace(kind=SERVED[a.kind])] for a in order if a.kind in RECEIVES}
    for receive in sorted(consumer, key=lambda receive: consumer[receive]):
        before[actions[max(0, consumer[receive] - ahead)]].append(receive)
    return [each for action in order if action.kind not in RECEIVES for each in (*before[action], action)]


def placed_by_torch(lowered: Lists, placement: Placement) -> Lists:
    """Place sends and receives as torch's pipelining does, whose ranks take an action each in turn."""
    compute = {
        rank: [
            torch_schedules._Action(
                placement.stage(rank, chunk), torch_schedules._ComputationType(kind.value), microbatch
            )
            for kind, chunk, microbatch in order
            if kind in COMPUTE_KINDS
        ]
        for rank, order in enumerate(lowered)
    }
    placed = torch_schedules._add_send_recv(compute, lambda stage: placement.places[stage][0], placement.count)
    return [
        [Action(Kind(each[1].value), placement.places[each[0]][1], each[2] or 0) for each in placed[rank]]
        for rank in range(placement.p)
    ]


def earliest(lowered: Lists, placement: Placement) -> Lists:
    """Move receives one by one, as far as no waits deadlock, and at most AHEAD compute actions before their consumer.
    None of the result can be moved further.
    """
    lists, moved = [list(order) for order in lowered], True
    while moved:
        moved = False
        for order in lists:
            for receive in [action for action in order if action.kind in RECEIVES]:
                at, consumer = order.index(receive), order.index(receive._replace(kind=SERVED[receive.kind]))
                work = [place for place, each in enumerate(order[:consumer]) if each.kind in COMPUTE_KINDS]
                before = [place for place in work if place < at]
                if before and len(work) - len(before) < AHEAD:
                    kept, to = list(order), before[-1]
                    order[:] = [*order[:to], receive, *order[to:at], *order[at + 1 :]]
                    if deadlocks(lists, placement):
                        order[:] = kept
                    else:
                        moved = True
    return lists


def deadlocks(lists: Lists, placement: Placement) -> bool:
    """Return True if some waits deadlock: the ranks' orders, with a send and its receive as one, have a cycle
    (`schedule.lower`).
    """
    graph = defaultdict[object, set[object]](set)
    for rank, order in enumerate(lists):
        for before, after in pairwise(_message(action, rank, placement) or (rank, action) for action in order):
            graph[after].add(before)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def _message(action: Action, rank: int, placement: Placement) -> object:
    """The kind of a message, the stage that receives it, and its micro-batch; None for other actions."""
    if action.kind not in SERVED:
        return None
    receives = action.kind in RECEIVES
    to = placement.stage(rank, action.chunk) if receives else neighbours(action, rank, placement).target
    return SERVED[action.kind], to, action.microbatch
