"""A step of many micro-batches, replayed from a few: in wavefronts, of which some are gone through again and again.

The rules are those of `simulate.replay`. Times are sums, and the later of two times: a max-plus system. If all that a
group of micro-batches leaves comes by between a and b later than what the group before it left, so it will with each
further group. How far apart a and b are says how exact the answer is if the others are not gone through. Reductions are
seen by themselves, for they may fall behind compute, which does not wait for them. What messages and reductions take
from each other is no sum and no later of two times: where they meet again and again, groups are left out only if all
takes the same time to a rounding, and reductions neither catch up nor fall behind, or are so far behind that each
message meets one all the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megascale.plan.estimate import Place
from megascale.plan.profiles import Hides
from megascale.plan.simulate import ROUNDING, Replay, Times
from megascale.plan.wavefronts import Mask, Numbers, Program, Wavefronts, Window

Seconds = NDArray[np.float64]
"""A column for each of the variants of a step that are replayed together."""

STEPS = (1, 4, 16, 64)
"""Groups after which times may come again that do not after one."""

EXACT = 1e-4
"""The part of a step's time by which the answer may be off."""

ALIKE = 1e-9
"""Likewise where messages and reductions meet; and where forwards pile up, for each rank then has a pace of its own."""


@dataclass(frozen=True)
class Repeating:
    """`estimate.Known` of a program, which is made when it is first needed."""

    numbers: Mapping[Place, list[int]]
    program: Callable[[], Program]

    def replay(self, variants: Sequence[Times], hides: Hides) -> list[Replay]:
        """They have no spans. Where not all groups are gone through, only the last of their ends is meant."""
        program = self.program()
        clocks, at = Clocks(program, variants, hides), 0
        for window in program.windows:
            clocks.play(at, window.end)
            clocks.repeat(window)
            at = window.end
        clocks.play(at, len(program.fronts.edges) - 1)
        return clocks.ends()


class _Left(NamedTuple):
    """When what a group of micro-batches leaves is there: `compute` and messages, and `dp`. `partly`: whether some
    message of a rank did not meet a reduction all the way.
    """

    compute: Seconds
    dp: Seconds
    partly: Mask


class Clocks:
    """Of all ranks. `now`: compute's; `dp`: until when collectives over dp take; `sent`: when each action's result has
    arrived; `free`: when the ways are by which results leave, of forwards and then of backwards.
    """

    def __init__(self, program: Program, variants: Sequence[Times], hides: Hides) -> None:
        fronts = self._fronts = program.fronts
        self._program, self._hides = program, hides
        count, columns = len(fronts.rank), len(variants)
        self._forward = _table(fronts, [times.forward for times in variants])
        self._backward = _table(fronts, [times.backward for times in variants])
        self._reduce = _table(fronts, [times.reduce for times in variants])
        self._hidden = 1 - 1 / np.maximum(_table(fronts, [times.buckets for times in variants]), 1)
        self._drag = np.array([times.drag for times in variants])
        self._contends = np.array([times.contends for times in variants])
        took = np.stack([self._forward, self._backward], 1).reshape(-1, columns)
        hops, message = (np.array(found) for found in zip(*((t.hops, t.message) for t in variants), strict=True))
        self._took = took[fronts.place] + hops * (fronts.source < count)[:, None]
        self._message = message * fronts.sends[:, None]
        self._meets = self._contends & (message > 0) & hides.dp & program.reduces_each
        self._tolerance = np.where(self._meets | program.piles, ALIKE, EXACT)
        self._now, self._dp = np.zeros((2, fronts.p, columns))
        self._partly = np.zeros((fronts.p, columns), bool)
        self._free = np.zeros((2 * fronts.p, columns))
        self._sent = np.full((count + 1, columns), -np.inf)  # what waits for nothing has the last of them
        self._ready = self._gather(_table(fronts, [times.gather for times in variants]))

    def _gather(self, took: Seconds) -> Seconds:
        """When the weights of each chunk are there for its first forward; the same as in `simulate`."""
        fronts, ready = self._fronts, np.zeros_like(took)
        if took.any():
            for place in fronts.place[fronts.opens] // 2:
                hidden, rank = self._hidden[place], place // fronts.v
                self._dp[rank] += took[place]
                early = np.minimum(took[place], self._forward[place]) * hidden
                ready[place] = np.where(took[place] > 0, self._dp[rank] - early, 0.0)
            if not self._hides.dp:
                self._now += self._dp
        return ready

    def play(self, start: int, end: int, window: Window | None = None) -> None:
        """Go through some wavefronts. `window`: they are its own, and were gone through before."""
        fronts, hides, contends = self._fronts, self._hides, bool(self._contends.any())
        source, offset = (window.source, fronts.edges[window.start]) if window else (fronts.source, 0)
        for front in range(start, end):
            a, b = fronts.edges[front], fronts.edges[front + 1]
            rows, took = fronts.rows[front], self._message[a:b]
            now = np.maximum(self._now[rows], self._sent[source[a - offset : b - offset]])
            if fronts.opening[front]:
                opens = fronts.opens[a:b, None]
                np.maximum(now, np.where(opens, self._ready[fronts.place[a:b] // 2], 0.0), out=now)
            now += self._took[a:b]
            leaves = np.maximum(now, self._free[fronts.way[a:b]]) if hides.pp else now
            if contends:
                took = took + self._shared(rows, leaves, took)
            self._sent[a:b] = leaves = leaves + took
            if hides.pp:
                self._free[fronts.way[a:b]] = leaves
            else:
                now = leaves
            self._now[rows] = now
            if fronts.reducing[front] and hides.dp:
                self._reduced(fronts.rank[a:b], fronts.place[a:b] // 2, fronts.reduces[a:b, None])

    def _shared(self, rows: slice | Numbers, start: Seconds, took: Seconds) -> Seconds:
        """What messages take longer by, because each has half of its way while a collective takes it too."""
        meet = np.minimum(took, self._dp[rows] - start)
        meet[(meet <= ROUNDING * took) | ~self._contends] = 0.0
        self._dp[rows] += meet
        self._partly[rows] |= meet < took * (1 - ALIKE)
        return meet

    def _reduced(self, ranks: Numbers, places: Numbers, chosen: Mask) -> None:
        """Gradients, from the first bucket that is complete; the last one comes after the backward."""
        took = self._reduce[places] * chosen
        now, hidden = self._now[ranks], self._hidden[places]
        start = np.maximum(now - self._backward[places] * hidden, self._dp[ranks])
        done = np.maximum(start + took, now + took * (1 - hidden))
        self._dp[ranks] = np.where(took > 0, done, self._dp[ranks])
        self._now[ranks] += took * hidden * self._drag

    def repeat(self, window: Window) -> None:
        """Go through a window as often as is left, or until it is known when all will be done."""
        lefts = deque([self._left(window)], maxlen=STEPS[-1] + 1)
        for done in range(window.left):
            others = window.left - done
            for step in STEPS:
                if done >= step and others % step == 0 and self._skip(window, lefts, step, others // step):
                    return
            self._partly = np.zeros_like(self._partly)
            self.play(window.start, window.end, window)
            lefts.append(self._left(window))

    def _left(self, window: Window) -> _Left:
        free = [self._free[window.ways]] if self._hides.pp else []  # else they are when compute goes on
        return _Left(np.concatenate([self._now, *free, self._sent[window.carried]]), self._dp.copy(), self._partly)

    def _skip(self, window: Window, lefts: Sequence[_Left], step: int, times: int) -> bool:
        """Let `times` further steps of so many groups be done, if it is known what they take; whether it is. `lefts`:
        of the last groups.
        """
        before, left = lefts[-1 - step], lefts[-1]
        later = left.compute - before.compute
        least, most = later.min(axis=0), later.max(axis=0)
        mean = (least + most) / 2
        ended = left.compute.max(axis=0) + mean * times
        if ((most - least) * times > self._tolerance * ended).any():
            return False
        if self._program.reduces_each and self._hides.dp:
            own = step * self._reductions(window)
            earliest = np.where(own > 0, left.dp - before.dp, mean)
            latest = np.maximum(np.maximum(earliest, most), own)
            slack, behind = ALIKE * ended, earliest - mean
            partly = np.any([lefts[-1 - ago].partly for ago in range(step)], axis=0)
            if (self._meets & ((behind < -slack) | ((behind > slack) & partly))).any():
                return False
            if ((latest - earliest) * times > self._tolerance * ended).any():
                return False
            self._dp += (earliest + latest) / 2 * times
        self._now += mean * times
        self._free[window.ways] += mean * times
        self._sent[window.actions] += mean * times
        return True

    def _reductions(self, window: Window) -> Seconds:
        """Seconds of each rank's in a window."""
        fronts = self._fronts
        counts = np.bincount(
            fronts.place[window.actions][fronts.reduces[window.actions]] // 2, minlength=len(self._reduce)
        )
        return self._by_rank(counts[:, None] * self._reduce)

    def _by_rank(self, seconds: Seconds) -> Seconds:
        """The sum over a rank's chunks."""
        return seconds.reshape(self._fronts.p, self._fronts.v, -1).sum(axis=1)

    def ends(self) -> list[Replay]:
        """What came of it, of each variant."""
        end, reduced = self._now, self._dp
        if not self._hides.dp:  # they come one by one, when compute is done
            late = self._program.reductions * self._by_rank(self._reduce)
            end = end + late
            reduced = np.where(late > 0, end, reduced)
        return [Replay(a.tolist(), b.tolist()) for a, b in zip(end.T, reduced.T, strict=True)]


def _table(fronts: Wavefronts, values: Sequence[Mapping[Place, float]]) -> Seconds:
    """A row for each rank's chunks."""
    places = [(rank, chunk) for rank in range(fronts.p) for chunk in range(fronts.v)]
    return np.array([[of.get(place, 0.0) for of in values] for place in places])
