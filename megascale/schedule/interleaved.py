"""Interleaved 1F1B: each rank runs v chunks in turn, so the pipeline fills in 1/v of the time (Narayanan et al. 2021,
2.2).

Micro-batches go through the chunks in groups of p: chunk 0 of the group, chunk 1 of the group, and so on. Where p does
not divide their number, some groups are larger, so any number can be run.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import NamedTuple

from megascale.schedule.ir import backward, forward
from megascale.schedule.one_f_one_b import one_f_one_b
from megascale.schedule.runs import ByRank, InRuns, Run, alternate


@InRuns
def interleaved_1f1b(p: int, v: int, m: int) -> ByRank:
    """Orders of p ranks with v chunks each, for m micro-batches. Bubble (p - 1) / (v m) of the work where p divides
    m. With one chunk it is 1F1B.
    """
    if v == 1:
        return one_f_one_b.runs(p, v, m)
    groups = _ranges(groups_of(p, m))
    forwards = [Run((forward(chunk, group[0]),), len(group)) for group in groups for chunk in range(v)]
    backwards = [Run((backward(chunk, group[0]),), len(group)) for group in groups for chunk in reversed(range(v))]
    # The first backward of the last rank follows the first forward of its last chunk; ranks before it need two more
    # forwards for each step that the activation and then its gradient travel.
    first = (v - 1) * len(groups[0])
    return lambda rank: alternate(forwards, backwards, first + 2 * (p - rank - 1))


class Groups(NamedTuple):
    """Some of one size, one after another."""

    number: int
    size: int


def groups_of(p: int, m: int) -> tuple[Groups, Groups]:
    """Micro-batches 0 to m in groups as equal as can be, none smaller than p unless m is: the larger ones, then the
    others.

    A group smaller than p would come back to rank 0 for its next chunk before it has left the last rank: ranks would
    wait for each other for ever in the steady phase.
    """
    number = max(1, m // p)
    size, larger = divmod(m, number)
    return Groups(larger, size + 1), Groups(number - larger, size)


def _ranges(groups: Iterable[Groups]) -> list[range]:
    """The micro-batches of each."""
    ends = list(accumulate(size for number, size in groups for _ in range(number)))
    return [range(start, end) for start, end in pairwise([0, *ends])]
