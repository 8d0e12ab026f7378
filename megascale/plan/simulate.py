"""A step replayed: every pipeline rank's actions in their order, on streams of compute and of communication.

The rules are those of the executor (`megascale.parallel.pipeline`) and of `megascale.parallel.gradients`: compute does
one action after another and waits for the message and the weights that it needs; a message leaves when it is made; a
chunk's gradients are reduced after its last backward, its weights gathered before its first forward. What a stack does
not hide is done in compute's own time. Ranks that differ in tp or dp only do the same at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megascale.plan.profiles import Hides
from megascale.schedule.ir import Action, Kind, Schedule

ROUNDING = 1e-6
"""Of a message: what it shares of its way no longer than this is a difference of sums that are the same."""

FORWARD, BACKWARD, SEND_F, SEND_B, REDUCE = Kind.F, Kind.B, Kind.SEND_F, Kind.SEND_B, Kind.REDUCE


@dataclass(frozen=True)
class Times:
    """Seconds of what a rank does, by its place in the pipeline and by chunk. `message`: between neighbours; `hops`:
    what a receiver does with it in compute's time; `reduce`, `gather`: of a chunk over dp, in so many `buckets` one
    after another (1 if not named); `drag`: the part of hidden ones that compute takes longer by; `contends`: whether
    messages and dp share a way.
    """

    forward: Mapping[tuple[int, int], float]
    backward: Mapping[tuple[int, int], float]
    message: float
    hops: float
    reduce: Mapping[tuple[int, int], float]
    gather: Mapping[tuple[int, int], float]
    buckets: Mapping[tuple[int, int], int] = field(default_factory=dict)
    drag: float = 0.0
    contends: bool = False


class Span(NamedTuple):
    """Something that happened on a rank: `row` is the stream. `waited`: from when until when compute did nothing but
    wait for it; what slows compute down stands there too, behind what it slows.
    """

    rank: int
    row: str
    action: Action
    start: float
    end: float
    waited: tuple[float, float] | None = None


Marks = list[tuple[int, str, Action, float, float, tuple[float, float] | None]]
"""Spans as plain tuples, which are made four times as fast: a step may have millions."""


@dataclass
class Replay:
    """What came of it. `end`: when each rank's compute is done; `reduced`: when its gradients are; `marks` in no
    order.
    """

    end: list[float]
    reduced: list[float]
    marks: Marks = field(default_factory=list)

    @property
    def spans(self) -> Iterator[Span]:
        """What happened."""
        return map(Span._make, self.marks)

    @property
    def last(self) -> float:
        """When all is done."""
        return max(*self.end, *self.reduced)


def replay(schedule: Schedule, v: int, times: Times, hides: Hides) -> Replay:
    """Run a lowered schedule of p ranks with `v` chunks each.

    Raises: RuntimeError if it does not come to its end.
    """
    ranks = [_Rank(number, order, len(schedule), v, times, hides) for number, order in enumerate(schedule)]
    arrived: dict[tuple[Kind, int, int], float] = {}
    waiting = set(range(len(ranks)))
    while waiting:
        moved = [number for number in sorted(waiting) if ranks[number].advance(arrived)]
        waiting -= {number for number in waiting if ranks[number].done}
        if not moved and waiting:
            raise RuntimeError(f"the schedule does not end: ranks {sorted(waiting)} wait for each other")
    for rank in ranks:
        rank.finish()
    return Replay(
        [rank.now for rank in ranks], [rank.dp for rank in ranks], [mark for rank in ranks for mark in rank.marks]
    )


class _Rank:
    """One rank's clock and streams. `now`: compute's; `dp`: until when its collectives over dp take."""

    def __init__(self, number: int, order: list[Action], p: int, v: int, times: Times, hides: Hides) -> None:
        self._number, self._order, self._p, self._last = number, order, p, p * v - 1
        self._times, self._hides = times, hides
        self._at = 0
        self._free: dict[Kind, float] = defaultdict(float)  # when a way to another rank is free
        self._gathered: dict[int, float] = {}
        self._late: list[Action] = []  # reductions that nothing hides
        self.now = self.dp = 0.0
        self.marks: Marks = []
        self._gather_all()

    @property
    def done(self) -> bool:
        return self._at == len(self._order)

    def advance(self, arrived: dict[tuple[Kind, int, int], float]) -> bool:
        """Do all that can be done; whether there was something."""
        first, order = self._at, self._order
        while self._at < len(order) and self._do(order[self._at], arrived):
            self._at += 1
        return self._at > first

    def finish(self) -> None:
        """The reductions that wait for the end."""
        for action in self._late:
            self._reduce(action)
            self.now = max(self.now, self.dp)

    def _do(self, action: Action, arrived: dict[tuple[Kind, int, int], float]) -> bool:
        kind, chunk, microbatch = action
        if kind is FORWARD or kind is BACKWARD:
            stage = chunk * self._p + self._number
            if self._p > 1 and (stage > 0 if kind is FORWARD else stage < self._last):  # is given something
                message = arrived.pop((kind, stage, microbatch), None)
                if message is None:
                    return False
                if kind is FORWARD:
                    self._wait(self._gathered.get(chunk, 0.0), "dp", action)
                self._wait(message, "pp", action)
                self.now += self._times.hops
            elif kind is FORWARD:
                self._wait(self._gathered.get(chunk, 0.0), "dp", action)
            took = (self._times.forward if kind is FORWARD else self._times.backward)[self._number, chunk]
            self.marks.append((self._number, "compute", action, self.now, self.now + took, None))
            self.now += took
        elif kind is SEND_F or kind is SEND_B:
            self._send(action, arrived)
        elif kind is REDUCE and self._times.reduce.get((self._number, chunk)):
            if self._hides.dp:
                self._reduce(action)
            else:
                self._late.append(action)
        return True

    def _wait(self, until: float, row: str, action: Action) -> None:
        if until > self.now:
            self.marks.append((self._number, row, action, self.now, until, (self.now, until)))
            self.now = until

    def _send(self, action: Action, arrived: dict[tuple[Kind, int, int], float]) -> None:
        kind, chunk, microbatch = action
        stage = chunk * self._p + self._number + (1 if kind is SEND_F else -1)
        took = self._times.message
        start = max(self.now, self._free[kind])
        if self._times.contends and self.dp - start > ROUNDING * took:  # each has half of the way while both take it
            shared = min(took, self.dp - start)
            self.dp += shared
            took += shared
        self._free[kind] = end = start + took
        arrived[FORWARD if kind is SEND_F else BACKWARD, stage, microbatch] = end
        self.marks.append((self._number, "pp", action, start, end, None if self._hides.pp else (self.now, end)))
        if not self._hides.pp:
            self.now = end

    def _gather_all(self) -> None:
        """The weights of each chunk, in the order of their forwards; a stack that hides nothing waits for all."""
        for action in self._order:
            if action.kind is Kind.GATHER and (took := self._times.gather.get((self._number, action.chunk), 0.0)):
                self.marks.append((self._number, "dp", action, self.dp, self.dp + took, None))
                self.dp += took
                self._gathered[action.chunk] = self._ready(action.chunk, self.dp, took)
        if not self._hides.dp and self.dp:
            self.marks.append((self._number, "dp", Action(Kind.GATHER, 0, 0), 0.0, self.dp, (0.0, self.dp)))
            self.now = self.dp

    def _ready(self, chunk: int, end: float, took: float) -> float:
        """When the forward of a chunk may begin whose buckets have arrived by `end`: each before it is needed."""
        buckets = self._times.buckets.get((self._number, chunk), 1)
        return max(end - took * (1 - 1 / buckets), end - self._times.forward[self._number, chunk] * (1 - 1 / buckets))

    def _reduce(self, action: Action) -> None:
        """Behind the rest of the backward, from the first bucket that is complete; the last one comes after it."""
        place = self._number, action.chunk
        took, start, rest = self._times.reduce[place], self.now, 0.0
        if self._hides.dp:
            rest = 1 - 1 / self._times.buckets.get(place, 1)
            start -= self._times.backward[place] * rest
        start = max(start, self.dp)
        self.dp = max(start + took, self.now + took * (1 - rest))
        before = self.now
        if self._hides.dp:
            self.now += took * rest * self._times.drag
        waited = before, (self.now if self._hides.dp else self.dp)
        self.marks.append((self._number, "dp", action, start, self.dp, waited))
