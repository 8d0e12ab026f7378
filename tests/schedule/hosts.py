"""Hosts that run their lists, and devices that do what is posted: whether a step ends if hosts wait for their devices.

As on NCCL: a send and its receive are kernels that run until both have been started, each behind the compute actions
that were posted before it and behind the messages before it on its channel. A host that does not wait posts its whole
list at once.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Set as AbstractSet

from megascale.schedule.check import dependencies
from megascale.schedule.ir import Action, Kind, Schedule

COMPUTE, RECEIVES = (Kind.F, Kind.B), (Kind.RECV_F, Kind.RECV_B)
MESSAGE = {Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.B, Kind.RECV_F: Kind.F, Kind.RECV_B: Kind.B}
"""What the other end of a message needs it for."""


def ends(schedule: Schedule, v: int, waits: AbstractSet[tuple[int, int]]) -> bool:
    """Whether a lowered schedule ends in which hosts wait for their devices at `waits`: before these actions, each
    given by its rank and its place in the rank's list.
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
    """What can be carried now from one rank to another; whether there was something."""
    out, into = sender.sends[receiver.number], receiver.receives[sender.number]
    moved = False
    while out and into and sender.runs(out[0]) and receiver.runs(into[0]):
        kind, chunk, microbatch = receiver.order[into[0]]
        receiver.arrived.add(Action(MESSAGE[kind], chunk, microbatch))
        del out[0], into[0]
        moved = True
    return moved


class _Rank:
    """`posted`: how much of its list the host has gone through; `arrived`: actions whose message has come. `left`: the
    compute actions that its device has yet to do, `sends` and `receives` the messages of each channel, by places.
    """

    def __init__(self, number: int, order: list[Action], p: int, v: int) -> None:
        self.number, self.order, self.posted = number, order, 0
        self.arrived = set[Action]()
        self.left = [at for at, action in enumerate(order) if action.kind in COMPUTE]
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
        """Whether the device has done all that was posted."""
        return all(
            places[0] >= self.posted for places in (self.left, *self.sends.values(), *self.receives.values()) if places
        )

    def compute(self) -> bool:
        """Do the actions that the device can; whether there was one."""
        before = len(self.left)
        while self.left and self.left[0] < self.posted:
            action = self.order[self.left[0]]
            if action in self._needs_message and action not in self.arrived:
                break
            del self.left[0]
        return len(self.left) < before

    def runs(self, at: int) -> bool:
        """Whether the kernel of a message has been started."""
        return at < self.posted and (not self.left or self.left[0] > at)


def places(schedule: Schedule, kinds: tuple[Kind, ...] = tuple(Kind)) -> set[tuple[int, int]]:
    """Where actions of some kinds stand."""
    return {
        (rank, at) for rank, order in enumerate(schedule) for at, action in enumerate(order) if action.kind in kinds
    }


def firsts(schedule: Schedule) -> set[tuple[int, int]]:
    """Where each rank does for the first time what loads kernels: the forward and the backward of each chunk."""
    found: dict[tuple[int, Kind, int], int] = {}
    for rank, at in sorted(places(schedule, COMPUTE)):
        found.setdefault((rank, *schedule[rank][at][:2]), at)
    return {(rank, at) for (rank, _, _), at in found.items()}


def any_order(p: int, v: int, m: int, chance: random.Random) -> Schedule:
    """Some compute schedule: whenever a rank is free it does any one action that can be done."""
    schedule: Schedule = [[] for _ in range(p)]
    done: set[tuple[Kind, int, int]] = set()
    left = [[Action(kind, chunk, i) for kind in COMPUTE for chunk in range(v) for i in range(m)] for _ in range(p)]
    while any(left):
        ready = [
            (rank, action)
            for rank, actions in enumerate(left)
            for action in actions
            if done.issuperset(dependencies(action, rank, p, v))
        ]
        rank, action = chance.choice(ready)
        left[rank].remove(action)
        schedule[rank].append(action)
        done.add((action.kind, action.chunk * p + rank, action.microbatch))
    return schedule
