"""What the ranks of a compute schedule do, as numbers: of each action what the memory that it needs depends on. What is
done again and again stands once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from megascale.schedule.ir import Kind
from megascale.schedule.lower import receives
from megascale.schedule.precedence import Precedence
from megascale.schedule.runs import ByRank, Run, expanded

BACKWARD = Kind.B

FEW = 512
"""Actions of all ranks up to which each receive is placed as the trainer places it, in milliseconds. In more, receives
count as posted as far ahead as any are: some at the end of warm-up and in the drain too early, none too late.
"""


class Done(NamedTuple):
    """An action. `first`: of the first micro-batch."""

    chunk: int
    backward: bool
    first: bool


def done(number: int) -> Done:
    """What a number says."""
    return Done(number >> 2, bool(number & 2), bool(number & 1))


def kinds(chunks: int) -> list[Done]:
    """What each number says, on a rank with so many chunks."""
    return [done(number) for number in range(4 * chunks)]


class Piece(NamedTuple):
    """Actions that are done `times` times one after another. `awaited`: while each of them runs, how many receives are
    posted for those that follow it (of many actions at most, see `FEW`).
    """

    numbers: tuple[int, ...]
    awaited: tuple[int, ...]
    times: int


class Orders:
    """What each of p ranks of a compute schedule with v chunks does, found when it is first asked for."""

    def __init__(self, runs: ByRank, p: int, v: int) -> None:
        self._runs, self._p, self._v = runs, p, v
        self._known: dict[tuple[int, int], list[Piece]] = {}

    def of(self, rank: int, ahead: int) -> list[Piece]:
        """Of one, that posts receives so many actions before they are needed."""
        if (rank, ahead) not in self._known:
            mixed = self._p == 2 and self._v > 1  # activations and gradients are one sender's, in whose order all are
            few = self._p * sum(len(run.actions) * run.times for run in self._runs(rank)) <= FEW
            self._known[rank, ahead] = self._exactly(rank, ahead) if mixed or few else self._straight(rank, ahead)
        return self._known[rank, ahead]

    def _straight(self, rank: int, ahead: int) -> list[Piece]:
        """With receives posted in the order in which they are needed, each as far ahead as it may be."""
        needs, found, next_needs = self._needs(rank), list[Piece](), tuple[int, ...]()
        for numbers, times in reversed([each for run in self._runs(rank) for each in _numbered(run, ahead)]):
            own = tuple([needs[number] for number in numbers])
            coming = own + (own * ahead if times > 1 else next_needs)
            awaited = tuple([sum(coming[at : at + ahead]) for at in range(1, len(own) + 1)])
            found.append(Piece(numbers, awaited, times))
            next_needs = coming[:ahead]
        return found[::-1]

    def _exactly(self, rank: int, ahead: int) -> list[Piece]:
        """Action by action: what is posted does not repeat itself as the actions do."""
        needs = self._needs(rank)
        numbers = [_number(*action) for action in self._precedence.compute[rank]]
        needed = accumulate(needs[number] for number in numbers)
        posted = accumulate(map(len, receives(self._precedence, rank, ahead)))
        return [Piece((number,), (there - own,), 1) for number, there, own in zip(numbers, posted, needed, strict=True)]

    @cached_property
    def _precedence(self) -> Precedence:
        return Precedence([expanded(self._runs(rank)) for rank in range(self._p)], self._v)

    def _needs(self, rank: int) -> list[int]:
        """By number, whether an action waits for a message."""
        last = self._p * self._v - 1
        stages = [(of.chunk * self._p + rank, last if of.backward else 0) for of in kinds(self._v)]
        return [int(self._p > 1 and stage != end) for stage, end in stages]


def _number(kind: Kind, chunk: int, micro_batch: int) -> int:
    return 4 * chunk + 2 * (kind is BACKWARD) + (micro_batch == 0)


def _numbered(run: Run, ahead: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """A run's numbers, and how often: alone those of the first micro-batch, and the last ones, which others follow."""
    left, first = run.times, tuple([_number(*action) for action in run.actions])
    numbers = tuple([number & ~1 for number in first])
    if first != numbers:
        yield first, 1
        left -= 1
    if left - ahead > 1:
        yield numbers, left - ahead
        left = ahead
    for _ in range(left):
        yield numbers, 1
