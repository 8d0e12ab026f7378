"""Two judges of the messages of a lowered schedule.

`check_messages` proves that no waits of any ranks deadlock: merge every send with its receive; if the graph of all
actions, with the order of every rank, has no cycle, even complete serialisation ends (Charron-Bost, Mattern and Tel
1996). `ends` simulates hosts and devices with NCCL semantics: a send and its receive are kernels that run until both
have started, after the compute actions posted before and after earlier messages of the channel. A host that does not
wait posts its full list at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set as AbstractSet
from graphlib import TopologicalSorter
from itertools import pairwise

from megascale.layout.stages import Placement
from megascale.schedule.dependencies import Result, dependencies, neighbours, results
from megascale.schedule.ir import (
    COMPUTE_KINDS,
    Action,
    Entry,
    Kind,
    Overlap,
    RankSchedule,
    Schedule,
    each_action,
    parts,
)

SENDS, RECEIVES = (Kind.SEND_F, Kind.SEND_B), (Kind.RECV_F, Kind.RECV_B)

Message = tuple[bool, int, int]
"""An activation or a gradient, the stage that receives it, and the micro-batch."""


def message_of(action: Action, rank: int, placement: Placement) -> Message | None:
    """Return the message of a SEND or a RECV, equal at both ends; None for other actions."""
    target = neighbours(action, rank, placement).target
    stage = {**dict.fromkeys(SENDS, target), **dict.fromkeys(RECEIVES, placement.stage(rank, action.chunk))}
    found = stage.get(action.kind)
    return None if found is None else (action.kind in (Kind.SEND_F, Kind.RECV_F), found, action.microbatch)


def check_messages(schedule: Schedule, placement: Placement) -> None:
    """Check that every message has two ends, between the actions that make and need it; that receives of a channel come
    in the order of its sends; and that no waits deadlock.

    Raises: AssertionError; graphlib.CycleError for waits that deadlock
    """
    sent, received = (channels(schedule, placement, kinds) for kinds in (SENDS, RECEIVES))
    assert sent == received, "receives of a channel are not in the order of its sends"
    for rank, order in enumerate(schedule):
        at = {action: index for index, entry in enumerate(order) for action in parts(entry)}
        for action in (action for action in each_action(order) if action.kind in COMPUTE_KINDS):
            source, target = neighbours(action, rank, placement)
            backward = action.kind is not Kind.F
            assert source is None or at[action._replace(kind=RECEIVES[backward])] < at[action]
            assert target is None or at[action._replace(kind=SENDS[backward])] > at[action]
    TopologicalSorter(merged_graph(schedule, placement)).prepare()


def channels(
    schedule: Schedule, placement: Placement, kinds: tuple[Kind, Kind]
) -> dict[tuple[int, int], list[Message | None]]:
    """List the messages that SENDS or RECEIVES name, in order, by sending and receiving rank."""
    found = defaultdict[tuple[int, int], list[Message | None]](list)
    for rank, order in enumerate(schedule):
        for action in (action for action in each_action(order) if action.kind in kinds):
            source, target = neighbours(action, rank, placement)
            other = target if kinds is SENDS else source
            assert other is not None, f"rank {rank}: {action} has no other end"
            ends = rank, placement.places[other][0]
            found[ends if kinds is SENDS else ends[::-1]].append(message_of(action, rank, placement))
    return found


def merged_graph(schedule: Schedule, placement: Placement) -> dict[object, set[object]]:
    """Map every action, and every message as one node, to what comes before: by the orders of the ranks, and by the
    dependencies of actions.
    """
    graph, made = defaultdict[object, set[object]](set), dict[Result, object]()
    for rank, order in enumerate(schedule):
        nodes = [node_of(entry, rank, placement) for entry in order]
        for before, after in pairwise(nodes):
            graph[after].add(before)
        made |= {result: (rank, entry) for entry in computed(order) for result in results(entry, rank, placement)}
    for rank, order in enumerate(schedule):
        for entry in computed(order):
            graph[rank, entry] |= {made[need] for need in dependencies(entry, rank, placement)}
    return graph


def node_of(entry: Entry, rank: int, placement: Placement) -> object:
    """Return the message of a SEND or a RECV, or what the rank does."""
    message = None if isinstance(entry, Overlap) else message_of(entry, rank, placement)
    return message or (rank, entry)


def computed(order: RankSchedule) -> list[Entry]:
    """List the compute actions of a rank, pairs as one."""
    return [entry for entry in order if parts(entry)[0].kind in COMPUTE_KINDS]


def ends(schedule: Schedule, placement: Placement, waits: AbstractSet[tuple[int, int]]) -> bool:
    """Return True if a lowered schedule ends when hosts wait for their devices before the actions `waits`, given as
    (rank, index in the rank's list).
    """
    ranks = [_Rank(number, order, placement) for number, order in enumerate(schedule)]
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while rank.posted < len(rank.order) and ((rank.number, rank.posted) not in waits or rank.idle()):
                rank.posted += 1
                moved = True
            moved |= rank.compute()
        for sender in ranks:
            for receiver in ranks:
                moved |= _carry(sender, receiver)
    return all(rank.posted == len(rank.order) and rank.idle() for rank in ranks)


def places(schedule: Schedule) -> set[tuple[int, int]]:
    """Return (rank, index) of all actions."""
    return {(rank, at) for rank, order in enumerate(schedule) for at in range(len(order))}


def _carry(sender: _Rank, receiver: _Rank) -> bool:
    """Complete all messages between two ranks that can complete; return True if there were any."""
    out, into = sender.sends[receiver.number], receiver.receives[sender.number]
    moved = False
    while out and into and sender.runs(out[0]) and receiver.runs(into[0]):
        receiver.arrived.add(receiver.order[into[0]])
        del out[0], into[0]
        moved = True
    return moved


class _Rank:
    """`posted`: number of actions the host has posted; `arrived`: receives whose message has arrived. `to_compute`:
    compute actions the device has not done; `sends` and `receives`: messages by channel; all as list indices.
    """

    def __init__(self, number: int, order: RankSchedule, placement: Placement) -> None:
        self.number, self.order, self.posted = number, order, 0
        self.arrived = set[Entry]()
        self.to_compute = [at for at, entry in enumerate(order) if parts(entry)[0].kind in COMPUTE_KINDS]
        self.sends, self.receives = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        self._needs = defaultdict[Entry, set[Entry]](set)
        for at, entry in enumerate(order):
            for action in parts(entry):
                source, target = neighbours(action, number, placement)
                if action.kind in SENDS and target is not None:
                    self.sends[placement.places[target][0]].append(at)
                elif action.kind in RECEIVES and source is not None:
                    self.receives[placement.places[source][0]].append(at)
                elif source is not None:
                    self._needs[entry].add(action._replace(kind=RECEIVES[action.kind is not Kind.F]))

    def idle(self) -> bool:
        """Return True if the device has done all posted actions."""
        return all(
            places[0] >= self.posted
            for places in (self.to_compute, *self.sends.values(), *self.receives.values())
            if places
        )

    def compute(self) -> bool:
        """Do all compute actions that can run; return True if there were any."""
        before = len(self.to_compute)
        while self.to_compute and self.to_compute[0] < self.posted:
            if not self._needs[self.order[self.to_compute[0]]] <= self.arrived:
                break
            del self.to_compute[0]
        return len(self.to_compute) < before

    def runs(self, at: int) -> bool:
        """Return True if the kernel of a message has started."""
        return at < self.posted and (not self.to_compute or self.to_compute[0] > at)
