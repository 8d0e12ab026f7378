"""A compute schedule in wavefronts: what its ranks would do at the same time if every action took as long.

The actions of a wavefront need none of each other, so their times are found together. Schedules repeat themselves:
micro-batches go one by one, or in groups, as equal as can be and none smaller than the p stages
(`schedule.interleaved`), and ranks do with each what they did with the one before. So the wavefronts of a few are those
of many, if some of them are gone through again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megascale.schedule.interleaved import groups_of
from megascale.schedule.ir import Kind
from megascale.schedule.runs import ByRank, Runs

Number = np.int32  # half of the room that a step's many actions take is twice the pace
Numbers = NDArray[Number]
Mask = NDArray[np.bool_]

BACKWARD = Kind.B

GROUPS = 4
"""Of one size that are there: two fill a pipeline, and two are compared, of which the last drains it."""


class Repeat(NamedTuple):
    """Micro-batches that a few stand for: `left` times `size`, as those from `first`. Those begin where the first rank
    does `kind` with the first of them. `alone`: nothing else is done there, on any rank.
    """

    kind: Kind
    first: int
    size: int
    left: int
    alone: bool = False


class Few(NamedTuple):
    """Micro-batches that stand for more."""

    micro_batches: int
    repeats: tuple[Repeat, ...]


def few_for(p: int, v: int, m: int, *, piles: bool) -> Few:
    """Those that stand for m, of p ranks with v chunks each. `piles`: all forwards come before all backwards."""
    alone = int(p == 1)  # has nothing to drain, and ends at once
    if v == 1:  # they fill the pipeline, and go on one by one, of which two are compared
        count = min(m, p + 2 + alone)
        left, kinds = m - count, ((Kind.F, p), (Kind.B, 0)) if piles else ((Kind.F, p),)
        return Few(count, tuple(Repeat(kind, first, 1, left, piles) for kind, first in kinds if left))
    count, some, repeats = 0, GROUPS + alone, list[Repeat]()
    for number, size in groups_of(p, m):
        if number > some:
            repeats.append(Repeat(Kind.F, count + 2 * size, size, number - some))
        count += min(number, some) * size
    return Few(count, tuple(repeats))


class Window(NamedTuple):
    """Wavefronts from `start`, before `end`, that are gone through `left` times more, as what follows the first time:
    `source` is then that of their `actions`, of which `carried` are results of the time before. `ways`: by which their
    results leave, as `Places` number them.
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


class Places(NamedTuple):
    """Forwards and backwards of all ranks' chunks, numbered 2 (rank v + chunk), and one more for backwards. `stage`: of
    the whole network's chunks; `gets`: whether it is sent the result of another rank; `sends`: whether it sends its
    own; `way`: by which that leaves, the rank's for forwards or p behind it that for backwards.
    """

    stage: Numbers
    backward: Mask
    gets: Mask
    sends: Mask
    way: Numbers


def places(p: int, v: int) -> Places:
    """Those of p ranks with v chunks each."""
    rank, chunk, backward = np.indices((p, v, 2), Number).reshape(3, -1)
    stage = chunk * p + rank
    first, last = stage == 0, stage == p * v - 1
    alone, back = p == 1, backward == 1
    return Places(
        stage, back, ~(np.where(back, last, first) | alone), ~(np.where(back, first, last) | alone), rank + p * backward
    )


@dataclass(frozen=True)
class Wavefronts:
    """Actions of p ranks with v chunks each, numbered by wavefront and then by rank; wavefront i has those from
    `edges[i]` before `edges[i + 1]`.

    Of each action: `rank`; `place`, as `Places` number them; `micro_batch`; `source`: the action whose result it is
    sent, or how many there are; `opens`: whether it is the first of its chunk; `reduces`: whether gradients are reduced
    after it.
    """

    p: int
    v: int
    edges: list[int]
    rank: Numbers
    place: Numbers
    micro_batch: Numbers
    source: Numbers
    opens: Mask
    reduces: Mask

    @cached_property
    def places(self) -> Places:
        """Where its actions are done."""
        return places(self.p, self.v)

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
        """Where a repeat's wavefronts are; None if not all chunks do as much there, those behind them are not the same,
        some micro-batches later, or need older results than those.
        """
        start, end = (self._wavefront(repeat.kind, repeat.first + more) for more in (0, repeat.size))
        if 2 * end - start >= len(self.edges):
            return None
        low, high, last = (self.edges[at] for at in (start, end, 2 * end - start))
        count, first, second = high - low, slice(low, high), slice(high, last)
        edges = np.array(self.edges)
        if last - high != count or (edges[start:end] + count != edges[end : 2 * end - start]).any():
            return None
        much = repeat.size * ((self.places.backward == (repeat.kind is BACKWARD)) | (not repeat.alone))
        if not np.array_equal(np.bincount(self.place[first], minlength=len(much)), much):
            return None
        later = self.micro_batch[second] - self.micro_batch[first]
        columns = self.place, self.reduces
        if (later != repeat.size).any() or not all(np.array_equal(of[first], of[second]) for of in columns):
            return None
        source = self.source[second]
        begins = np.repeat(edges[start:end], np.diff(edges[start : end + 1]))
        before = source < high  # results of the first time, which must be there still when they are needed
        if (source[before] < begins[before]).any() or self.source[high:].min() < low:
            return None
        found = np.where(before | (source == len(self.rank)), source, source - count)
        ways = np.unique(self.places.way[self.place[first]])
        return Window(start, end, repeat.left, first, found, np.unique(source[before]), ways)

    def _wavefront(self, kind: Kind, micro_batch: int) -> int:
        """In which the first rank does `kind` with a micro-batch, on its first chunk."""
        chosen = (self.place == (kind is BACKWARD)) & (self.micro_batch == micro_batch)
        return int(np.searchsorted(self.edges, np.flatnonzero(chosen)[0], side="right")) - 1


def program(
    schedule: Callable[[int], ByRank], p: int, v: int, m: int, *, piles: bool, repeats: bool, reduces_each: bool
) -> Program:
    """A step of m micro-batches. `schedule`: of so many of them; `piles`, `repeats`: as its card says."""
    few = few_for(p, v, m, piles=piles) if repeats else Few(m, ())
    fronts = wavefronts(schedule(few.micro_batches), p, v, reduces_each=reduces_each)
    windows = tuple(window for repeat in few.repeats if (window := fronts.window(repeat)))
    if len(windows) < len(few.repeats):
        fronts, windows = wavefronts(schedule(m), p, v, reduces_each=reduces_each), ()
    return Program(fronts, windows, piles, reduces_each, m if reduces_each else 1)


def wavefronts(schedule: ByRank, p: int, v: int, *, reduces_each: bool) -> Wavefronts:
    """Of a compute schedule of p ranks. `reduces_each`: gradients are reduced after each backward, not only a chunk's
    last.

    Raises: RuntimeError if it does not come to its end.
    """
    at, ranks = places(p, v), [_actions(schedule(rank), rank, v) for rank in range(p)]
    m = 1 + max(int(each.micro_batch.max()) for each in ranks)
    own = at.stage + p * v * at.backward
    before = np.where(at.gets, own + np.where(at.backward, 1, -1), 2 * p * v).astype(Number)
    key, source = (  # of an action among all, and of the one that it needs; rank by rank, which stays in the cache
        np.concatenate([(of * m).take(each.place) + each.micro_batch for each in ranks]) for of in (own, before)
    )
    lengths, count, keys = [len(each.place) for each in ranks], len(key), (2 * p * v + 1) * m
    done, number = np.zeros(keys, bool), np.full(keys, count, Number)
    done[keys - m :] = True
    fronts = _fronts(np.array(lengths), key, source, done)
    order = np.concatenate(fronts)
    number[key[order]] = np.arange(count, dtype=Number)
    place, micro_batch, opens, completes = (np.concatenate(column)[order] for column in zip(*ranks, strict=True))
    reduces = at.backward[place] if reduces_each else completes
    edges = [0, *accumulate(map(len, fronts))]
    return Wavefronts(p, v, edges, place // (2 * v), place, micro_batch, number[source[order]], opens, reduces)


class _Actions(NamedTuple):
    """What one rank does. `completes`: whether it is the last backward of its chunk."""

    place: Numbers
    micro_batch: Numbers
    opens: Mask
    completes: Mask


def _actions(runs: Runs, rank: int, v: int) -> _Actions:
    named, count = list[tuple[int, ...]](), 0
    first, last = dict[int, int](), dict[int, int]()  # action at each place
    for actions, times in runs:
        for begin, (kind, chunk, micro_batch) in enumerate(actions, count):
            place = 2 * (rank * v + chunk) + (kind is BACKWARD)
            named.append((begin, len(actions), times, place, micro_batch))
            first.setdefault(place, begin)
            last[place] = begin + len(actions) * (times - 1)
        count += len(actions) * times
    begins, step, times, place, micro_batch = np.array(named, Number).T
    done = np.arange(count, dtype=Number) - np.repeat(times.cumsum(dtype=Number) - times, times)
    at = np.repeat(begins, times) + np.repeat(step, times) * done
    places, micro_batches = np.empty((2, count), Number)
    places[at], micro_batches[at] = np.repeat(place, times), np.repeat(micro_batch, times) + done
    opens, completes = np.zeros((2, count), bool)
    opens[[begin for place, begin in first.items() if place % 2 == 0]] = True
    completes[[end for place, end in last.items() if place % 2]] = True
    return _Actions(places, micro_batches, opens, completes)


def _fronts(lengths: Numbers, key: Numbers, source: Numbers, done: Mask) -> list[Numbers]:
    """The actions of each wavefront, of ranks that do so many one after another. `key`: of an action among all;
    `source`: of the one whose result it needs; `done`: of each key, whether that is there from the beginning.
    """
    ends = lengths.cumsum()
    at, fronts = ends - lengths, list[Numbers]()
    while (waiting := np.flatnonzero(at < ends)).size:
        here = at.take(waiting)
        can = done.take(source.take(here))
        fronts.append(here[can])
        if not can.any():
            raise RuntimeError(f"the schedule does not end: ranks {waiting.tolist()} wait for each other")
        done[key.take(fronts[-1])] = True
        at[waiting[can]] += 1
    return fronts


def _index(ranks: Numbers) -> slice | Numbers:
    """Ranks in their order, as a slice if there are none between them that are not there."""
    first, last = int(ranks[0]), int(ranks[-1])
    return slice(first, last + 1) if last - first + 1 == len(ranks) else ranks
