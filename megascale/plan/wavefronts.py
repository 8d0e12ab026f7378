"""A compute schedule in wavefronts: what its ranks would do at the same time if every action took as long.

The actions of a wavefront need none of each other, so their times are found together. Schedules repeat themselves:
micro-batches go in groups, as equal as can be and none smaller than the p stages (`schedule.interleaved`), and ranks do
with each what they did with the one before. So the wavefronts of a few groups are those of many, if some of them are
gone through again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megascale.schedule.interleaved import Groups, groups_of
from megascale.schedule.ir import Kind, Order, Schedule

Numbers = NDArray[np.intp]
Mask = NDArray[np.bool_]

BACKWARD = Kind.B

GROUPS = 4
"""Of one size that are there: two fill a pipeline, and two are compared, of which the last drains it."""


class Repeat(NamedTuple):
    """Micro-batches that a few stand for: `left` times `size`, as those from `first`. Those begin where the first rank
    does `kind` with the first of them.
    """

    kind: Kind
    first: int
    size: int
    left: int


class Few(NamedTuple):
    """Micro-batches that stand for more."""

    micro_batches: int
    repeats: tuple[Repeat, ...]


def few_for(p: int, v: int, m: int, *, piles: bool) -> Few:
    """Those that stand for m, of p ranks with v chunks each. `piles`: all forwards come before all backwards."""
    if piles:
        least = 3 * p + 1  # of which all ranks do 2 p at the same time, forwards and then backwards
        count = min(m, least + (m - least) % p)
        left = (m - count) // p
        return Few(count, (Repeat(Kind.F, p, p, left), Repeat(Kind.B, 0, p, left)) if left else ())
    count, runs = (m % p, (Groups(m // p, p),)) if v == 1 else (0, groups_of(p, m))
    repeats, some = list[Repeat](), GROUPS + (p == 1)  # alone a rank has nothing to drain, and ends at once
    for number, size in runs:
        if number > some:
            repeats.append(Repeat(Kind.F, count + 2 * size, size, number - some))
        count += min(number, some) * size
    return Few(count, tuple(repeats))


class Window(NamedTuple):
    """Wavefronts from `start`, before `end`, that are gone through `left` times more, as what follows the first time:
    `source` is then that of their `actions`, of which `carried` are results of the time before. `ways`: by which their
    results leave, as `Wavefronts.way` has them.
    """

    start: int
    end: int
    left: int
    actions: slice
    source: Numbers
    carried: Numbers
    ways: Numbers


class Program(NamedTuple):
    """A step: wavefronts, of which windows are gone through more than once, one behind the other. `piles`: all forwards
    come before all backwards; `reduces_each`: gradients are reduced after each backward, in all so many `reductions` of
    each chunk.
    """

    fronts: Wavefronts
    windows: tuple[Window, ...]
    piles: bool
    reduces_each: bool
    reductions: int


@dataclass(frozen=True)
class Wavefronts:
    """Actions of p ranks with v chunks each, numbered by wavefront and then by rank; wavefront i has those from
    `edges[i]` before `edges[i + 1]`.

    Of each action: `rank`; `place`: 2 (rank v + chunk), and one more if it is a backward; `micro_batch`; `source`: the
    action whose result it is sent, or how many there are; `sends`: whether its own is sent; `opens`: whether it is the
    first of its chunk; `reduces`: whether gradients are reduced after it.
    """

    p: int
    v: int
    edges: list[int]
    rank: Numbers
    place: Numbers
    micro_batch: Numbers
    source: Numbers
    sends: Mask
    opens: Mask
    reduces: Mask

    @cached_property
    def way(self) -> Numbers:
        """By which each action's result leaves: its rank's for forwards, or p behind it that for backwards."""
        return self.rank + self.p * (self.place & 1)

    @cached_property
    def rows(self) -> list[slice | Numbers]:
        """Of each wavefront its ranks, to index arrays with."""
        return [_index(self.rank[a:b]) for a, b in pairwise(self.edges)]

    @cached_property
    def opening(self) -> list[bool]:
        """Of each wavefront, whether some action opens its chunk."""
        return np.logical_or.reduceat(self.opens, self.edges[:-1]).tolist()

    @cached_property
    def reducing(self) -> list[bool]:
        """Of each wavefront, whether gradients are reduced after some action."""
        return np.logical_or.reduceat(self.reduces, self.edges[:-1]).tolist()

    def window(self, repeat: Repeat) -> Window | None:
        """Where a repeat's wavefronts are; None if those behind them are not the same, some micro-batches later, or
        need older results than those.
        """
        start, end = (self._wavefront(repeat.kind, repeat.first + more) for more in (0, repeat.size))
        if 2 * end - start >= len(self.edges):
            return None
        low, high, last = (self.edges[at] for at in (start, end, 2 * end - start))
        count, first, second = high - low, slice(low, high), slice(high, last)
        edges = np.array(self.edges)
        if last - high != count or (edges[start:end] + count != edges[end : 2 * end - start]).any():
            return None
        later = self.micro_batch[second] - self.micro_batch[first]
        columns = self.rank, self.place, self.sends, self.reduces
        if (later != repeat.size).any() or not all(np.array_equal(of[first], of[second]) for of in columns):
            return None
        source = self.source[second]
        begins = np.repeat(edges[start:end], np.diff(edges[start : end + 1]))
        before = source < high  # results of the first time, which must be there still when they are needed
        if (source[before] < begins[before]).any() or self.source[high:].min() < low:
            return None
        found = np.where(before | (source == len(self.rank)), source, source - count)
        return Window(start, end, repeat.left, first, found, np.unique(source[before]), np.unique(self.way[first]))

    def _wavefront(self, kind: Kind, micro_batch: int) -> int:
        """In which the first rank does `kind` with a micro-batch, on its first chunk."""
        chosen = (self.place == (kind is BACKWARD)) & (self.micro_batch == micro_batch)
        return int(np.searchsorted(self.edges, np.flatnonzero(chosen)[0], side="right")) - 1


def program(schedule: Callable[[int], Schedule], p: int, v: int, m: int, *, piles: bool, reduces_each: bool) -> Program:
    """A step of m micro-batches. `schedule`: of so many of them; `piles`: all forwards come before all backwards."""
    few = few_for(p, v, m, piles=piles)
    fronts = wavefronts(schedule(few.micro_batches), v, reduces_each=reduces_each)
    windows = tuple(window for repeat in few.repeats if (window := fronts.window(repeat)))
    if len(windows) < len(few.repeats):
        fronts, windows = wavefronts(schedule(m), v, reduces_each=reduces_each), ()
    return Program(fronts, windows, piles, reduces_each, m if reduces_each else 1)


def wavefronts(schedule: Schedule, v: int, *, reduces_each: bool) -> Wavefronts:
    """Of a compute schedule. `reduces_each`: gradients are reduced after each backward, not only a chunk's last.

    Raises: RuntimeError if it does not come to its end.
    """
    p = len(schedule)
    backward, chunk, micro_batch = map(np.concatenate, zip(*map(_columns, schedule), strict=True))
    lengths = np.array([len(order) for order in schedule])
    rank, count = np.repeat(np.arange(p), lengths), len(chunk)
    place, stage, m = 2 * (rank * v + chunk) + backward, chunk * p + rank, int(micro_batch.max()) + 1
    first, last = (stage == 0) | (p == 1), (stage == p * v - 1) | (p == 1)
    sends, needs = ~np.where(backward, first, last), ~np.where(backward, last, first)
    key = (backward * p * v + stage) * m + micro_batch  # of an action among all, its source m before or behind it
    source = np.where(needs, key + np.where(backward, m, -m), 2 * p * v * m)
    fronts = _fronts(lengths, key, source, 2 * p * v * m)
    order, number = np.concatenate(fronts), np.full(2 * p * v * m + 1, count)
    number[key[order]] = np.arange(count)
    begins, ends = np.zeros((2, 2 * p * v), np.intp)
    begins[place[::-1]], ends[place] = np.arange(count)[::-1], np.arange(count)  # of some to one place the last counts
    opens, complete = np.zeros((2, count), bool)
    opens[begins[::2]] = complete[ends[1::2]] = True
    return Wavefronts(
        p, v, [0, *accumulate(map(len, fronts))], rank[order], place[order], micro_batch[order], number[source[order]],
        sends[order], opens[order], (backward & (complete | reduces_each))[order],
    )  # fmt: skip


def _columns(order: Order) -> tuple[Mask, Numbers, Numbers]:
    """Of each action whether it is a backward, its chunk and its micro-batch."""
    count = len(order)
    backward = np.fromiter((action[0] is BACKWARD for action in order), bool, count)
    chunk, micro_batch = (np.fromiter(map(itemgetter(column), order), np.intp, count) for column in (1, 2))
    return backward, chunk, micro_batch


def _fronts(lengths: Numbers, key: Numbers, source: Numbers, keys: int) -> list[Numbers]:
    """The actions of each wavefront, of ranks that do so many one after another. `key`: of an action among so many;
    `source`: of the one whose result it needs, or `keys`.
    """
    ends = lengths.cumsum()
    at, done = ends - lengths, np.zeros(keys + 1, bool)
    done[keys] = True
    fronts = list[Numbers]()
    while (waiting := np.flatnonzero(at < ends)).size:
        here = at[waiting]
        can = done[source[here]]
        fronts.append(here[can])
        if not can.any():
            raise RuntimeError(f"the schedule does not end: ranks {waiting.tolist()} wait for each other")
        done[key[fronts[-1]]] = True
        at[waiting[can]] += 1
    return fronts


def _index(ranks: Numbers) -> slice | Numbers:
    """Ranks in their order, as a slice if there are none between them that are not there."""
    first, last = int(ranks[0]), int(ranks[-1])
    return slice(first, last + 1) if last - first + 1 == len(ranks) else ranks
