"""Simulation of hosts and devices with NCCL semantics: does a step end if hosts wait for their devices?

A send and its receive are kernels that run until both have started, after the compute actions posted before and after
earlier messages of the channel. A host that does not wait posts its full list at once.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Set as AbstractSet

from megascale.schedule.check import dependencies
from megascale.schedule.ir import Action, Kind, Schedule

COMPUTE, RECEIVES = (Kind.F, Kind.B), (Kind.RECV_F, Kind.RECV_B)
MESSAGE = {Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.B, Kind.RECV_F: Kind.F, Kind.RECV_B: Kind.B}
"""The kind of action that consumes a message."""


def ends(schedule: Schedule, v: int, waits: AbstractSet[tuple[int, int]]) -> bool:
    """Return True if a lowered schedule ends when hosts wait for their devices before the actions `waits`, given as
    (rank, index in the rank's list).
    """
    ranks = [_Rank(number, order, len(schedule), v) for number, order in enumerate(schedule)]
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


def _carry(sender: _Rank, receiver: _Rank) -> bool:
    """Complete all messages between two ranks that can complete; return True if there were any."""
    out, into = sender.sends[receiver.number], receiver.receives[sender.number]
    moved = False
    while out and into and sender.runs(out[0]) and receiver.runs(into[0]):
        kind, chunk, microbatch = receiver.order[into[0]]
        receiver.arrived.add(Action(MESSAGE[kind], chunk, microbatch))
        del out[0], into[0]
        moved = True
    return moved


class _Rank:
    """`posted`: number of actions the host has posted; `arrived`: actions whose message has arrived. `to_compute`:
    compute actions the device has not done; `sends` and `receives`: messages by channel; all as list indices.
    """

    def __init__(self, number: int, order: list[Action], p: int, v: int) -> None:
        self.number, self.order, self.posted = number, order, 0
        self.arrived = set[Action]()
        self.to_compute = [at for at, action in enumerate(order) if action.kind in COMPUTE]
        self.sends, self.receives = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        self._needs_message = set[Action]()
        for at, action in enumerate(order):
            stage = action.chunk * p + number
            if action.kind in COMPUTE:
                if any(need % p != number for _, need, _ in dependencies(action, number, p, v)):
                    self._needs_message.add(action)
                continue
            match action.kind:
                case Kind.SEND_F:
                    self.sends[(stage + 1) % p].append(at)
                case Kind.SEND_B:
                    self.sends[(stage - 1) % p].append(at)
                case Kind.RECV_F:
                    self.receives[(stage - 1) % p].append(at)
                case Kind.RECV_B:
                    self.receives[(stage + 1) % p].append(at)

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
            action = self.order[self.to_compute[0]]
            if action in self._needs_message and action not in self.arrived:
                break
            del self.to_compute[0]
        return len(self.to_compute) < before

    def runs(self, at: int) -> bool:
        """Return True if the kernel of a message has started."""
        return at < self.posted and (not self.to_compute or self.to_compute[0] > at)


def places(schedule: Schedule, kinds: tuple[Kind, ...] = tuple(Kind)) -> set[tuple[int, int]]:
    """Return (rank, index) of all actions of some kinds."""
    return {
        (rank, at) for rank, order in enumerate(schedule) for at, action in enumerate(order) if action.kind in kinds
    }


def firsts(schedule: Schedule) -> set[tuple[int, int]]:
    """Return (rank, index) of the first forward and backward per chunk, which load kernels."""
    results: dict[tuple[int, Kind, int], int] = {}
    for rank, at in sorted(places(schedule, COMPUTE)):
        results.setdefault((rank, *schedule[rank][at][:2]), at)
    return {(rank, at) for (rank, _, _), at in results.items()}


def any_order(p: int, v: int, m: int, chance: random.Random) -> Schedule:
    """Draw a random compute schedule: pick any action whose dependencies are done."""
    schedule: Schedule = [[] for _ in range(p)]
    done: set[tuple[Kind, int, int]] = set()
    remaining = [[Action(kind, chunk, i) for kind in COMPUTE for chunk in range(v) for i in range(m)] for _ in range(p)]
    while any(remaining):
        ready = [
            (rank, action)
            for rank, actions in enumerate(remaining)
            for action in actions
            if done.issuperset(dependencies(action, rank, p, v))
        ]
        rank, action = chance.choice(ready)
        remaining[rank].remove(action)
        schedule[rank].append(action)
        done.add((action.kind, action.chunk * p + rank, action.microbatch))
    return schedule
