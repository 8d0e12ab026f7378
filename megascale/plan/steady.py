"""A step of many micro-batches, replayed from a few: in wavefronts, of which some are gone through again and again.

The rules are those of `simulate.replay`. Times are sums, and the later of two times: a max-plus system. If all that a
group of micro-batches leaves comes by between a and b later than what the group before it left, so it will with each
further group. How far apart a and b are says how exact the answer is if the others are not gone through. Reductions are
seen by themselves, for they may fall behind compute, which does not wait for them. What messages and reductions take
from each other is no sum and no later of two times: where they meet again and again, groups are left out only if all
takes the same time to a rounding, and reductions neither catch up nor fall behind, or are so far behind that each
message meets one all the way; weights that are gathered still are such.

While the same of two times is always the later, all goes on as it did, each rank at its own pace: exactly, and until
the first of those that are catching up has done so. Where micro-batches go one by one each comparison is kept, to know
when that is (`_until_a_bend`): a pipeline of ranks that are nearly alike may take thousands to settle.
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
from megascale.plan.wavefronts import Numbers, Program, Wavefronts, Window

Seconds = NDArray[np.float64]
"""A column for each of the variants of a step that are replayed together."""

EXACT = 1e-4
"""The part of a step's time by which the answer may be off."""

ALIKE = 1e-9
"""Likewise where messages meet reductions or gathers, or forwards pile up."""

EQUAL = 1e-14
"""The part of a time by which two ways to the same may differ, for each sum is rounded."""


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
    """What a window leaves, as in `Clocks`: `free` of its ways, `sent` of results that are looked at; `ahead`: by how
    much the one of two times was later than the other, of all that were compared, if they were kept.
    """

    now: Seconds
    dp: Seconds
    free: Seconds
    sent: Seconds
    ahead: Seconds

    @property
    def waited_for(self) -> Seconds:
        """All that others may have to wait for."""
        return np.concatenate([self.now, self.free, self.sent])

    def after(self, before: _Left) -> _Left:
        """How much later all that is."""
        return _Left(*(a - b for a, b in zip(self, before, strict=True)))


class Clocks:
    """Of all ranks. `now`: compute's; `dp`: until when collectives over dp take; `sent`: when each action's result has
    arrived; `free`: when the ways are by which results leave, of forwards and then of backwards. `partly`:
    whether some message of a rank did not meet a collective over dp all the way since that was last cleared; `ahead`:
    as in `_Left`, of the wavefronts since, if they are kept.
    """

    def __init__(self, program: Program, variants: Sequence[Times], hides: Hides) -> None:
        fronts = self._fronts = program.fronts
        self._program, self._hides = program, hides
        places, columns = fronts.places, len(variants)
        self._forward = _table(fronts, [times.forward for times in variants])
        self._backward = _table(fronts, [times.backward for times in variants])
        self._reduce = _table(fronts, [times.reduce for times in variants])
        self._hidden = 1 - 1 / np.maximum(_table(fronts, [times.buckets for times in variants]), 1)
        hops, message = (np.array(found) for found in zip(*((t.hops, t.message) for t in variants), strict=True))
        self._contends = np.array([times.contends for times in variants]) & (message > 0)
        self._took = np.stack([self._forward, self._backward], 1).reshape(-1, columns) + hops * places.gets[:, None]
        self._message = message * places.sends[:, None]
        self._reductions = self._parts(np.array([times.drag for times in variants]))
        self._meets = self._contends & hides.dp & program.reduces_each
        self._tolerance = np.where(self._meets | program.piles, ALIKE, EXACT)
        self._now, self._dp = np.zeros((2, fronts.p, columns))
        self._partly = np.zeros((fronts.p, columns), bool)
        self._ahead: list[Seconds] | None = None
        self._free = np.zeros((2 * fronts.p, columns))
        self._sent = np.empty((len(fronts.rank) + 1, columns))
        self._sent[-1] = -np.inf  # what waits for nothing has this
        self._ready = self._gather(_table(fronts, [times.gather for times in variants]))

    def _parts(self, drag: Seconds) -> NDArray[np.float64]:
        """Of a reduction after each chunk's backward: what it takes, how much of that at most before the backward's end
        and how much at least after it, and what compute takes longer by. Of one that takes nothing nothing is later.
        """
        took, hidden = self._reduce, self._hidden
        early = np.where(took > 0, self._backward * hidden, np.inf)
        late = np.where(took > 0, took * (1 - hidden), -np.inf)
        return np.stack([took, early, late, took * hidden * drag])

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
            rows, place = fronts.rows[front], fronts.place[a:b]
            took, way = self._message.take(place, 0), fronts.places.way.take(place)
            now = self._later(self._now[rows], self._sent.take(source[a - offset : b - offset], 0))
            if fronts.opening[front]:
                opens = fronts.opens[a:b, None]
                np.maximum(now, np.where(opens, self._ready[place // 2], 0.0), out=now)
            now += self._took.take(place, 0)
            leaves = self._later(now, self._free.take(way, 0))
            if contends:
                took = took + self._shared(rows, leaves, took)
            self._sent[a:b] = self._free[way] = leaves = leaves + took
            self._now[rows] = now if hides.pp else leaves
            if fronts.reducing[front] and hides.dp:
                chosen = np.flatnonzero(fronts.reduces[a:b])
                self._reduced(fronts.rank[a:b].take(chosen), place.take(chosen) // 2)

    def _later(self, one: Seconds, other: Seconds) -> Seconds:
        """Of two times."""
        if self._ahead is not None:
            self._ahead.append(one - other)
        return np.maximum(one, other)

    def _shared(self, rows: slice | Numbers, start: Seconds, took: Seconds) -> Seconds:
        """What messages take longer by, because each has half of its way while a collective takes it too."""
        taken = self._dp[rows] - start
        meet = np.minimum(took, taken)
        if self._ahead is not None:
            self._ahead += [taken, taken - took]
        meet[(meet <= ROUNDING * took) | ~self._contends] = 0.0
        self._dp[rows] += meet
        self._partly[rows] |= meet < took * (1 - ALIKE)
        return meet

    def _reduced(self, ranks: Numbers, places: Numbers) -> None:
        """Gradients, from the first bucket that is complete; the last one comes after the backward."""
        now, (took, early, late, drag) = self._now.take(ranks, 0), self._reductions.take(places, 1)
        start = self._later(now - early, self._dp.take(ranks, 0))
        self._dp[ranks] = self._later(start + took, now + late)
        self._now[ranks] = now + drag

    def repeat(self, window: Window) -> None:
        """Go through a window as often as is left, or until it is known when all will be done: what it leaves is held
        against what it left some times before, 1, then up to 2, 4, 8 ... (Brent 1980).
        """
        last = deque([self._left(window)], maxlen=3)
        left, before, times, most = window.left, last[-1], 0, 1
        while left:
            if times == most:
                before, times, most = last[-1], 0, 2 * most
            if times == 0:
                self._partly = np.zeros_like(self._partly)
            self._ahead = [] if self._one_by_one else None
            self.play(window.start, window.end, window)
            last.append(self._left(window))
            left, times = left - 1, times + 1
            if left >= times and self._alike(window, before, last[-1], times, left // times):
                skipped = left // times * times
            else:
                skipped = self._until_a_bend(window, last, left)
            self._ahead = None
            if skipped:
                left, times = left - skipped, most
                last = deque([self._left(window)], maxlen=3)

    @property
    def _one_by_one(self) -> bool:
        """Whether a window is a micro-batch."""
        return self._fronts.v == 1

    def _left(self, window: Window) -> _Left:
        sent = self._sent[window.actions if self._one_by_one else window.carried]
        ahead = np.concatenate(self._ahead) if self._ahead else self._now[:0]
        known = np.nan_to_num(ahead, posinf=0.0, neginf=0.0)  # what nothing else can be later than bends nothing
        return _Left(self._now.copy(), self._dp.copy(), self._free[window.ways], sent.copy(), known)

    def _alike(self, window: Window, before: _Left, left: _Left, step: int, times: int) -> bool:
        """Let a window be done `times` times `step` times more, if it is known what that takes, as much for all ranks;
        whether it is. `before`: what it left `step` times before what is `left` now.
        """
        later = left.waited_for - before.waited_for
        least, most = later.min(axis=0), later.max(axis=0)
        mean = (least + most) / 2
        ended = left.waited_for.max(axis=0) + mean * times
        if ((most - least) * times > self._tolerance * ended).any():
            return False
        own = step * self._reduces(window)
        gathers = self._contends & (own == 0) & (left.dp > left.now)  # still, and messages meet that
        moves = gathers | (own > 0)
        earliest = np.where(moves, left.dp - before.dp, mean)
        latest = np.maximum(np.maximum(earliest, most), own)
        slack, behind = ALIKE * ended, earliest - mean
        wavers = (gathers | self._meets) & ((behind < -slack) | ((gathers | (behind > slack)) & self._partly))
        tolerance = np.where(gathers.any(axis=0), ALIKE, self._tolerance)
        late = np.maximum(most - least, latest - earliest) * times > tolerance * ended
        if (wavers | late).any():
            return False
        self._go_on(window, times, _Left(mean, np.where(moves, (earliest + latest) / 2, 0.0), mean, mean, mean))
        return True

    def _until_a_bend(self, window: Window, last: Sequence[_Left], most: int) -> int:
        """Let a window be done as often as all goes on as it did, each rank at its own pace; how often that is. `last`:
        what it left the last times, of which three are needed.
        """
        if not self._one_by_one or len(last) < 3:
            return 0
        first, second, left = last
        if len(first.ahead) < len(left.ahead):  # nothing was compared before the first
            return 0
        later, slack = left.after(second), EQUAL * np.maximum(left.waited_for.max(axis=0), left.dp.max(axis=0))
        if any((np.abs(a) > slack).any() for a in later.after(second.after(first))):
            return 0
        caught_up = (np.abs(later.ahead) > slack) & (left.ahead * later.ahead < 0)
        soonest = (-left.ahead[caught_up] / later.ahead[caught_up]).min(initial=most)
        times = int(soonest)
        self._go_on(window, times, later)
        return times

    def _go_on(self, window: Window, times: int, later: _Left) -> None:
        """All that a window leaves is so much later, so many times."""
        self._now += later.now * times
        self._dp += later.dp * times
        self._free[window.ways] += later.free * times
        self._sent[window.actions] += later.sent * times

    def _reduces(self, window: Window) -> Seconds:
        """Seconds of each rank's in a window."""
        fronts = self._fronts
        if not (self._program.reduces_each and self._hides.dp):
            return np.zeros_like(self._now)
        reduced = fronts.place[window.actions][fronts.reduces[window.actions]]
        return self._by_rank(np.bincount(reduced // 2, minlength=len(self._reduce))[:, None] * self._reduce)

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
