"""A step of many micro-batches, replayed from a few.

Schedules repeat themselves: micro-batches go in groups, as equal as can be and none smaller than the p stages
(`schedule.interleaved`), and ranks do with each group what they did with the one before. Once each action follows its
predecessor by the same time, every further group takes that time. And if all follow by a time between a and b, so they
will ever after, for a replay is made of sums and of the later of two times alone (a max-plus system): how far apart a
and b are says how exact the answer is. What messages and reductions take from each other is neither: where they meet
again and again, every micro-batch is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megascale.plan.estimate import Place
from megascale.plan.profiles import Hides
from megascale.plan.simulate import Replay, Times, replay
from megascale.schedule.ir import Kind, Schedule

ENDS = 8
"""Groups that fill a pipeline, and drain it, and a few: they are always replayed."""

STEPS = (4, 16, 64)
"""Groups by which the replays differ, of which a further one's time is found; more where fewer are not exact."""

EXACT = 1e-3
"""The part of a step's time by which the answer may be off."""


@dataclass(frozen=True)
class Repeating:
    """`estimate.Known` of `m` micro-batches in `p` stages. `schedule`: lowered, for a number of micro-batches."""

    numbers: Mapping[Place, list[int]]
    p: int
    m: int
    reduce_each: bool
    schedule: Callable[[int], Schedule]

    def replay(self, v: int, times: Times, hides: Hides) -> Replay:
        """Without spans, where it is not of all micro-batches."""
        meet = self.reduce_each and hides.dp and times.contends
        for step in () if meet else STEPS:
            few = few_for(self.p, self.m, step)
            if few is None:
                break
            found = {count: replay(self.schedule(count), v, times, hides) for count in few.weights}
            joined = _joined(found, few.weights)
            if uncertainty(found[max(found)], few, hides) <= EXACT * joined.last:
                return joined
        return replay(self.schedule(self.m), v, times, hides)


@dataclass(frozen=True)
class Run:
    """Groups of one size, one after another: `first` groups come before."""

    first: int
    count: int
    size: int


@dataclass(frozen=True)
class Few:
    """Steps that stand for one of many micro-batches: `weights`: the part that each has in it, by the number of their
    micro-batches. `groups`: of the largest; `longer`: by how many times `step` groups each of these runs is.
    """

    weights: dict[int, float]
    groups: tuple[Run, ...]
    longer: tuple[float, ...]
    step: int


def few_for(p: int, m: int, step: int) -> Few | None:
    """Steps of p stages that stand for m micro-batches, with runs of groups that differ by `step`; None if together
    they had as many micro-batches.
    """
    groups, longer, weights = list[Run](), list[float](), dict[int, float]()
    for run in runs_of(p, m):
        count = min(run.count, ENDS + step + (run.count - ENDS) % step)
        groups.append(Run(sum(each.count for each in groups), count, run.size))
        longer.append((run.count - count) / step)
    most = sum(run.count * run.size for run in groups)
    weights[most] = 1.0 + sum(longer)
    for run, times in zip(groups, longer, strict=True):
        if times:
            fewer = most - step * run.size
            weights[fewer] = weights.get(fewer, 0.0) - times
    return Few(weights, tuple(groups), tuple(longer), step) if sum(weights) < m else None


def runs_of(p: int, m: int) -> list[Run]:
    """The groups of m micro-batches in p stages, the larger ones first."""
    count = max(1, m // p)
    size, larger = divmod(m, count)
    return [Run(0, larger, size + 1), Run(larger, count - larger, size)]


def uncertainty(found: Replay, few: Few, hides: Hides) -> float:
    """Seconds by which the step that `few` stand for may be off. `found`: of the largest of them."""
    streams = {Kind.SEND_F, Kind.SEND_B, *([Kind.REDUCE] if hides.dp else [])}  # others come one by one, at the end
    done = {
        (span.rank, span.action): span.end
        for span in found.spans
        if span.row == "compute" or span.action.kind in streams
    }
    group = [run.first + each // run.size for run in few.groups for each in range(run.count * run.size)]
    off = 0.0
    for run, times in zip(few.groups, few.longer, strict=True):
        if times:
            end, by = run.first + run.count, few.step * run.size
            later = []
            for (rank, action), at in done.items():
                last = end - group[action.microbatch]
                before = rank, action._replace(microbatch=action.microbatch - by)
                # what the drain does not reach yet, nor the filling: backwards come two groups behind
                if before in done and last in ((2, 3, 4) if action.kind in (Kind.F, Kind.SEND_F) else (4, 5, 6)):
                    later.append(at - done[before])
            off += times * (max(later) - min(later))
    return off


def _joined(found: Mapping[int, Replay], weights: Mapping[int, float]) -> Replay:
    """Each rank's times, summed with the weights."""

    def of(times: Callable[[Replay], list[float]]) -> list[float]:
        parts = [[weight * at for at in times(found[count])] for count, weight in weights.items()]
        return [sum(rank) for rank in zip(*parts, strict=True)]

    return Replay(of(lambda replay: replay.end), of(lambda replay: replay.reduced))
