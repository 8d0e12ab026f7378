"""Interleaved 1F1B: each rank runs v chunks in turn, so the pipeline fills in 1/v of the time (Narayanan et al. 2021,
2.2).

Micro-batches go through the chunks in groups of p: chunk 0 of the group, chunk 1 of the group, and so on. Where p does
not divide their number, some groups are larger, so any number can be run.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

from megascale.schedule.ir import Order, backward, forward
from megascale.schedule.one_f_one_b import alternate, one_f_one_b


def interleaved_1f1b(p: int, v: int, m: int, rank: int) -> Order:
    """List the actions of `rank` of p, with v chunks each, for m micro-batches. The bubble is (p - 1) / (v m) of the
    work where p divides m. With one chunk this is 1F1B.
    """
    if v == 1:
        return one_f_one_b(p, v, m, rank)
    sizes = [size for number, size in groups_of(p, m) for _ in range(number)]
    groups = [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]
    forwards = [forward(chunk, i) for group in groups for chunk in range(v) for i in group]
    backwards = [backward(chunk, i) for group in groups for chunk in reversed(range(v)) for i in group]
    # The first backward of the last rank follows the first forward of its last chunk; ranks before it need two more
    # forwards for each step that the activation and then its gradient travel.
    first = (v - 1) * sizes[0]
    return alternate(forwards, backwards, warmup=first + 2 * (p - rank - 1))


class Groups(NamedTuple):
    """`number` groups of `size` micro-batches, one after another."""

    number: int
    size: int


def groups_of(p: int, m: int) -> tuple[Groups, Groups]:
    """Cut micro-batches 0 to m into groups as equal as can be, none smaller than p unless m is: the larger ones, then
    the others.

    A group smaller than p would come back to rank 0 for its next chunk before it has left the last rank: ranks would
    wait for each other for ever in the steady phase.
    """
    number = max(1, m // p)
    size, larger = divmod(m, number)
    return Groups(larger, size + 1), Groups(number - larger, size)
