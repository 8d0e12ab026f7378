"""A step of many micro-batches, replayed from a few.

Schedules repeat themselves: micro-batches go in groups, as equal as can be and none smaller than the p stages
(`schedule.interleaved`), and ranks do with each group what they did with the one before; with one chunk a rank they do
so with each micro-batch, and with any p of them. Once each action follows its predecessor by the same time, every
further group takes that time. And if all follow by a time between a and b, so they will ever after, for a replay is
made of sums and of the later of two times alone (a max-plus system): how far apart a and b are says how exact the
answer is. Reductions are seen by themselves, for they may fall behind compute, which does not wait for them. What
messages and reductions take from each other is no sum and no later of two times: where they meet again and again, it
goes on only if all takes the same time to a rounding, and reductions neither catch up nor fall behind, or are so far
behind that each message meets one until the end. Else every micro-batch is replayed.

Where no backward comes before the last forward nothing repeats itself; but forwards, and then backwards, go through a
line of machines that take the same for each micro-batch. The end of such a line is the latest of sums, each of which
grows by a machine's time with every micro-batch: what one more adds never falls, nor is it ever more than the slowest
machines take. Once it is that, it stays so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megascale.plan.estimate import Place
from megascale.plan.profiles import Hides
from megascale.plan.simulate import Replay, Times, replay
from megascale.schedule.interleaved import Groups, groups_of
from megascale.schedule.ir import Kind, Schedule


@dataclass(frozen=True)
class Margins:
    """Groups that are always replayed: `ends` of them fill a pipeline, settle in it and drain it. Settled are `window`,
    before the last `forward` of forwards and the last `backward` of backwards.
    """

    ends: int
    window: int
    forward: int
    backward: int


ONE_CHUNK = Margins(ends=4, window=1, forward=1, backward=2)
"""A rank's backward comes at most p micro-batches behind the forward before it."""

MANY_CHUNKS = Margins(ends=8, window=3, forward=1, backward=3)
"""It comes two groups behind."""

STEPS = (1, 4, 16, 64)
"""Groups after which actions come again, of which a further group's time is found; more where fewer are not exact."""

LINES = (2, 8, 32)
"""Groups of as many micro-batches as there are stages, after which the slowest of a line may say how long each takes.
"""

EXACT = 1e-3
"""The part of a step's time by which the answer may be off."""

SENDS = (Kind.SEND_F, Kind.SEND_B)

ALIKE = 1e-9
"""Likewise where messages and reductions meet: only if each group takes the same as the one before."""


@dataclass(frozen=True)
class Repeating:
    """`estimate.Known` of `m` micro-batches in `p` stages. `schedule`: lowered, for a number of micro-batches; `piles`:
    no backward comes before the last forward, and nothing repeats itself.
    """

    numbers: Mapping[Place, list[int]]
    p: int
    m: int
    reduce_each: bool
    piles: bool
    schedule: Callable[[int], Schedule]

    def replay(self, v: int, times: Times, hides: Hides) -> Replay:
        """Where it is not of all micro-batches it has no spans, and of its ends only the last is meant."""
        meet = self.reduce_each and hides.dp and times.contends and times.message > 0
        tolerance = ALIKE if meet else EXACT
        if self.piles and not meet and (piled := self._piled(v, times, hides)):
            return piled
        for step in () if self.piles else STEPS:
            few = few_for(self.p, self.m, step, one_chunk=v == 1 and not meet)
            if few is None:
                break
            found = replay(self.schedule(few.micro_batches), v, times, hides)
            paces = further(found, few, hides)
            alike = all(pace.most - pace.least <= tolerance * (found.last + pace.least) for pace in paces.values())
            if alike and (not meet or lasts(found, few, paces, times.message)):
                return self._longer(found, few, paces, v, times, hides)
        return replay(self.schedule(self.m), v, times, hides)

    def _piled(self, v: int, times: Times, hides: Hides) -> Replay | None:
        """A few micro-batches, and for each other what the last of them added, if that is the most that one can."""
        most = line_pace(times, self.p, hides, self.reduce_each)
        for few in (groups * self.p for groups in LINES):
            if few + 1 >= self.m:
                break
            before, found = (replay(self.schedule(count), v, times, hides) for count in (few, few + 1))
            if found.last - before.last >= most - ALIKE * found.last:
                others = (self.m - few - 1) * most
                return Replay([end + others for end in found.end], [end + others for end in found.reduced])
        return None

    def _longer(self, found: Replay, few: Few, paces: Paces, v: int, times: Times, hides: Hides) -> Replay:
        """`found` with what the other groups take, and their reductions, where those come one by one at the end."""
        others = self.m - few.micro_batches if self.reduce_each and not hides.dp else 0
        end, reduced = list(found.end), list(found.reduced)
        for rank in range(self.p):
            reduces = sum(times.reduce.get((rank, chunk), 0.0) for chunk in range(v))
            end[rank] += paces[None].mean + others * reduces
            reduced[rank] += paces.get(rank, paces[None]).mean + others * reduces if reduces else 0.0
        return Replay(end, reduced)


class Run(NamedTuple):
    """Groups of one size that are replayed, and how many more there are."""

    groups: Groups
    left: int


@dataclass(frozen=True)
class Few:
    """Groups that stand for many, after `first` micro-batches: actions come again `step` groups later."""

    first: int
    runs: tuple[Run, ...]
    step: int
    margins: Margins

    @property
    def micro_batches(self) -> int:
        return self.first + sum(run.groups.number * run.groups.size for run in self.runs)

    def settled(self) -> Iterator[tuple[Run, Mapping[Kind, range]]]:
        """Of each run of which groups are left, by kind the micro-batches whose actions neither the filling reaches nor
        the drain.
        """
        after, margins = self.first, self.margins  # micro-batches of a run and those before it
        for run in self.runs:
            number, size = run.groups
            after += number * size
            if run.left:
                ends = dict.fromkeys(Kind, after - margins.backward * size)
                ends |= dict.fromkeys((Kind.F, Kind.SEND_F), after - margins.forward * size)
                yield run, {kind: range(end - margins.window * size, end) for kind, end in ends.items()}


def few_for(p: int, m: int, step: int, *, one_chunk: bool = False) -> Few | None:
    """Groups of p stages that stand for m micro-batches; None if they are all."""
    margins, first = (ONE_CHUNK, m % p) if one_chunk else (MANY_CHUNKS, 0)
    runs = list[Run]()
    for groups in [Groups(m // p, p)] if one_chunk else groups_of(p, m):
        number = min(groups.number, margins.ends + step + (groups.number - margins.ends) % step)
        runs.append(Run(groups._replace(number=number), groups.number - number))
    return Few(first, tuple(runs), step, margins) if any(run.left for run in runs) else None


class Pace(NamedTuple):
    """Seconds that the groups take that are left."""

    least: float = 0.0
    most: float = 0.0

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2


def line_pace(times: Times, p: int, hides: Hides, reduce_each: bool) -> float:
    """Seconds by which one more micro-batch lengthens a step of p ranks at most, where all forwards come before all
    backwards: those of the slowest of each line's ranks and messages.
    """
    hop, sent = times.hops, 0.0 if hides.pp else times.message
    apart = times.message if hides.pp and p > 1 else 0.0
    forward = backward = apart
    added = 0.0  # by reductions that are done at the end
    for rank in range(p):
        reduce = times.reduce.get((rank, 0), 0.0) if reduce_each else 0.0
        hidden = 1 - 1 / times.buckets.get((rank, 0), 1)
        slowed = reduce * hidden * times.drag if hides.dp else 0.0
        last = rank == p - 1
        forward = max(forward, times.forward[rank, 0] + (hop if rank else 0.0) + (0.0 if last else sent))
        done = times.backward[rank, 0] + (0.0 if last else hop) + (sent if rank else 0.0) + slowed
        backward = max(backward, done, reduce if hides.dp else 0.0)
        added = max(added, 0.0 if hides.dp else reduce)
    return forward + backward + added


Paces = Mapping[int | None, Pace]
"""Of compute and messages (None), and by rank of the reductions of its gradients, which may fall behind."""


def further(found: Replay, few: Few, hides: Hides) -> Paces:
    """What the groups take that are left. `found`: of the others."""
    paces = dict[int | None, Pace]()
    for (groups, left), settled in few.settled():
        times = left / few.step
        for key, later in _later(found, few.step * groups.size, settled, hides).items():
            before = paces.get(key, Pace())
            paces[key] = Pace(before.least + min(later) * times, before.most + max(later) * times)
    slowest = paces[None].most  # which reductions that catch up will have as well
    return {key: pace._replace(most=max(pace.most, slowest)) for key, pace in paces.items()}


def lasts(found: Replay, few: Few, paces: Paces, message: float) -> bool:
    """Whether messages of `message` seconds, and reductions, will meet as they have: the same then as now."""
    compute, slack = paces[None].mean, ALIKE * (found.last + paces[None].mean)
    if any(pace.mean < compute - slack for pace in paces.values()):
        return False
    behind = {rank for rank, pace in paces.items() if rank is not None and pace.mean > compute + slack}
    _, settled = next(few.settled())
    return all(
        end - start >= 2 * message * (1 - ALIKE)  # it shares the way all the time
        for rank, _, (kind, _, microbatch), start, end, _ in found.marks
        if rank in behind and kind in SENDS and microbatch >= settled[kind].start
    )


def _later(found: Replay, by: int, settled: Mapping[Kind, range], hides: Hides) -> dict[int | None, list[float]]:
    """Seconds by which each settled action ends after the one `by` micro-batches before it, as `Paces` has them."""
    done, bounds = {}, {kind: (chosen.start - by, chosen.stop) for kind, chosen in settled.items()}
    for rank, row, (kind, chunk, microbatch), _, end, _ in found.marks:
        low, high = bounds[kind]
        if low <= microbatch < high and (row == "compute" or kind in SENDS or kind is Kind.REDUCE):
            done[rank, kind, chunk, microbatch] = end
    later = defaultdict[int | None, list[float]](list)
    for (rank, kind, chunk, microbatch), end in done.items():
        if microbatch >= settled[kind].start:
            reduces = kind is Kind.REDUCE
            if hides.dp or not reduces:  # others come one by one, at the end
                later[rank if reduces else None].append(end - done[rank, kind, chunk, microbatch - by])
    return later
