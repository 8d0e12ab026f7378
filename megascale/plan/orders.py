"""What the ranks of a compute schedule do, as arrays, to look at all actions of a rank at once."""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megascale.schedule.ir import Kind, Order, Schedule

Numbers = NDArray[np.intp]
Marks = NDArray[np.bool_]

BACKWARD = Kind.B


class Actions(NamedTuple):
    """Of a rank, one after another: whether each is a backward, of which chunk, and of which micro-batch."""

    backward: Marks
    chunk: Numbers
    micro_batch: Numbers


def actions(order: Order) -> Actions:
    """Of forwards and backwards."""
    count = len(order)
    backward = np.fromiter((action[0] is BACKWARD for action in order), bool, count)
    chunk, micro_batch = (np.fromiter(map(itemgetter(column), order), np.intp, count) for column in (1, 2))
    return Actions(backward, chunk, micro_batch)


class Orders:
    """Those of all ranks, each made when it is first asked for. `schedule`: as lists."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._known: dict[int, Actions] = {}

    def __getitem__(self, rank: int) -> Actions:
        if rank not in self._known:
            self._known[rank] = actions(self.schedule[rank])
        return self._known[rank]
