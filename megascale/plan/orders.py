"""What the ranks of a compute schedule do, as numbers: of each action what the memory that it needs depends on."""

from __future__ import annotations

from typing import NamedTuple

from megascale.schedule.ir import Kind, Schedule

BACKWARD = Kind.B


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


class Orders:
    """Of each rank the numbers of its actions, found when they are first asked for. `schedule`: the actions."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._known: dict[int, list[int]] = {}

    def __getitem__(self, rank: int) -> list[int]:
        if rank not in self._known:
            order = self.schedule[rank]
            self._known[rank] = [4 * chunk + 2 * (kind is BACKWARD) + (i == 0) for kind, chunk, i in order]
        return self._known[rank]
