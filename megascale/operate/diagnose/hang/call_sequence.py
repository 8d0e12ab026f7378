"""The program of a rank in its flight record: its calls in order, and the calls after each call.

Ranks of a role make the same calls, and a rank makes the same calls in every step and for every micro-batch and layer,
but for the numbers. So the call after a call is known from other ranks, from earlier steps, from other micro-batches
and from other layers: four levels of likeness.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from megascale.record.layout import CONTROL
from megascale.record.rank_state import RankState

Role = frozenset[tuple[str, str, int]]
"""Groups and distances of peers: equal on ranks of a stage, which make the same calls."""


class Call(NamedTuple):
    """An action on a micro-batch, or a communication, with the facts that are equal on ranks of a role.

    `group`: its name, its kind ("action" without a group), and the distance of the peer. `action`: the name of the last
    action on a micro-batch, because a backward that recomputes makes the calls of the forward once more.
    """

    group: tuple[str, str, int]
    action: str
    name: str
    part: str
    chunk: int
    layer: int
    microbatch: int
    step: int

    def __str__(self) -> str:
        tensor = f" {self.part!r}" if self.part else ""
        layer = f" of layer {self.layer}" if self.layer >= 0 else ""
        group = f" in group {self.group[0]}" if self.group[0] else ""
        micro_batch = f" for micro-batch {self.microbatch}" if self.microbatch >= 0 else ""
        return f"{self.name}{tensor}{layer}{group}{micro_batch}"


class CallMatch(IntEnum):
    """The number of last fields of `Call` in which two calls may differ."""

    SAME = 0
    OTHER_STEP = 1
    OTHER_MICROBATCH = 2
    OTHER_LAYER = 3


Follower = tuple[Any, ...]
"""A call relative to the one before it: where both have a layer, micro-batch or step, the difference."""


def role_of(record: RankState) -> Role:
    """Return the role of a rank. Its groups are known from their opening on; control data passes when it is due."""
    states = (state for state in record.groups.values() if state.kind != CONTROL)
    return frozenset((state.name, state.kind, _distance(record.rank, state.peer)) for state in states)


def follower(call: Call, following: Call, likeness: CallMatch) -> Follower:
    """Return `following` relative to the `call` before it, equal for pairs of calls that are alike."""
    fixed = len(call) - likeness
    numbers: zip[tuple[Any, Any]] = zip(call[fixed:], following[fixed:], strict=True)
    return following[:fixed] + tuple(b - a if a >= 0 <= b else (b,) for a, b in numbers)


def resolve(call: Call, relative: Follower, likeness: CallMatch) -> Call:
    """Return the call that is `relative` to a call: the inverse of `follower`."""
    fixed = len(call) - likeness
    numbers: zip[tuple[Any, Any]] = zip(call[fixed:], relative[fixed:], strict=True)
    return Call(*relative[:fixed], *(b[0] if isinstance(b, tuple) else a + b for a, b in numbers))


class CallSequence:
    """The newest `calls` of a rank, oldest first, with their sequence `numbers` (-1: an action).

    The optimizer's actions are left out, because their order may vary, and so are calls of an action that is older than
    the record.
    """

    def __init__(self, record: RankState) -> None:
        self.calls: list[Call] = []
        self.numbers: list[int] = []
        action = ""
        for event in record.last:
            if event.kind == CONTROL or (not event.group and event.microbatch < 0):
                continue
            if not event.group:
                if not action:
                    self.calls, self.numbers = [], []
                action = event.name
            state = record.groups.get(event.group)
            group = (state.name if state else "", event.kind, _distance(record.rank, event.peer))
            self.calls.append(
                Call(group, action, event.name, event.part, event.chunk, event.layer, event.microbatch, event.step)
            )
            self.numbers.append(event.sequence)
        self._microbatches = {call.microbatch for call in self.calls}
        self._layers = {call.layer for call in self.calls}
        self._places: dict[CallMatch, defaultdict[tuple[Any, ...], list[int]]] = {}

    def may_have(self, call: Call) -> bool:
        """Return False for a call of a micro-batch or layer that no call of the rank has: past the last of a step."""
        return call.microbatch in self._microbatches and call.layer in self._layers

    def after(self, call: Call, likeness: CallMatch = CallMatch.SAME, until: int | None = None) -> Counter[Follower]:
        """Return the counts of calls after calls like `call`, before place `until`."""
        found = (at for at in self._find(call, likeness) if until is None or at < until)
        return Counter(follower(self.calls[at], self.calls[at + 1], likeness) for at in found)

    def place(self, call: Call) -> int | None:
        """Return the place of a call, the first of several; None for the last call of the record."""
        return next(iter(self._find(call, CallMatch.SAME)), None)

    def _find(self, call: Call, likeness: CallMatch) -> Sequence[int]:
        fixed = len(call) - likeness
        if likeness not in self._places:
            places = self._places[likeness] = defaultdict(list)
            for at, other in enumerate(self.calls[:-1]):
                places[other[:fixed]].append(at)
        return self._places[likeness].get(call[:fixed], ())


def _distance(rank: int, peer: int) -> int:
    return peer - rank if peer >= 0 else 0
