"""A schedule in short: what is done again and again, each time with the next micro-batch, is said once.

A rank of p stages with v chunks does 2 v m actions in a step of m micro-batches, but in some 4 v runs for every p of
them: what is planned of many stages and micro-batches goes by these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import update_wrapper
from typing import NamedTuple

from megascale.schedule.ir import Action, Order, Schedule


class Run(NamedTuple):
    """Actions that are done `times` times one after another, at first with the micro-batches that they name."""

    actions: tuple[Action, ...]
    times: int = 1

    def at(self, done: int) -> tuple[Action, ...]:
        """What is done after so many times."""
        return tuple([Action(kind, chunk, first + done) for kind, chunk, first in self.actions])

    def rest(self, done: int) -> Runs:
        """What is left after so many times: one run, or none."""
        return [Run(self.at(done), self.times - done)] if done < self.times else []


Runs = list[Run]
"""What one rank does."""

ByRank = Callable[[int], Runs]
"""What each rank does, made when it is asked for."""


class InRuns:
    """A schedule's function that is written in runs: of (stages p, chunks v, micro-batches m), as all of them are."""

    def __init__(self, runs: Callable[[int, int, int], ByRank]) -> None:
        self.runs = runs
        update_wrapper(self, runs)

    def __call__(self, p: int, v: int, m: int) -> Schedule:
        runs = self.runs(p, v, m)
        return [expanded(runs(rank)) for rank in range(p)]


def runs_of(schedule: Callable[[int, int, int], Schedule], p: int, v: int, m: int) -> ByRank:
    """A schedule's runs; each action is one, if it is not written in runs."""
    return schedule.runs(p, v, m) if isinstance(schedule, InRuns) else one_by_one(schedule(p, v, m))


def one_by_one(schedule: Schedule) -> ByRank:
    """Each action as a run."""
    return lambda rank: [Run((action,)) for action in schedule[rank]]


def expanded(runs: Iterable[Run]) -> Order:
    """All actions."""
    return [action for run in runs for done in range(run.times) for action in run.at(done)]


def alternate(forwards: Runs, backwards: Runs, warmup: int) -> Runs:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left. There are as many
    of both, given in runs of one action each.
    """
    count = sum(run.times for run in forwards)
    warmup = min(warmup, count)
    ahead, others = _cut(forwards, warmup)
    behind, left = _cut(backwards, count - warmup)
    return [*ahead, *_in_turn(others, behind), *left]


def _cut(runs: Runs, count: int) -> tuple[Runs, Runs]:
    """The first so many actions, and the others."""
    first, others = Runs(), runs[::-1]
    while count:
        run = others.pop()
        times = min(run.times, count)
        first.append(Run(run.actions, times))
        others += run.rest(times)
        count -= times
    return first, others[::-1]


def _in_turn(forwards: Runs, backwards: Runs) -> Iterator[Run]:
    forwards, backwards = forwards[::-1], backwards[::-1]
    while forwards:
        f, b = forwards.pop(), backwards.pop()
        times = min(f.times, b.times)
        yield Run(f.actions + b.actions, times)
        forwards += f.rest(times)
        backwards += b.rest(times)
