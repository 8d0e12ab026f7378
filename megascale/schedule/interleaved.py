"""Interleaved 1F1B: v model chunks per rank, which divides the bubble by v (Narayanan et al. 2021, 2.2).

Micro-batches pass through the chunks in groups of p: the group on chunk 0, the group on chunk 1, and on to the last. If
p does not divide the number of micro-batches, some groups are larger: any number works.

Time by rank, p = 2 ranks, v = 2 chunks, m = 4 micro-batches; F10: forward on chunk 1 of micro-batch 0, group {0, 1}:

    rank 0  F00 F01 F10 F11 F02 .   B10---- F03 B11---- F12 B00---- F13 B01---- .   B12---- .   B13---- B02---- B03----
    rank 1  .   F00 F01 F10 B10---- F11 B11---- F02 B00---- F03 B01---- F12 B12---- F13 B13---- B02---- B03---- .   .

Combined 1F1B has one forward more ahead, so that each steady forward runs in a pair with the backward of another
micro-batch, as in Megatron-LM: the exchange of experts of one is hidden behind the compute of the other.

    rank 0  F00 F01 F10 F11 F02 F03&B10 F12&B11 F13&B00 B01 B12 B13 B02 B03
    rank 1  F00 F01 F10 F11&B10 F02&B11 F03&B00 F12&B01 F13&B12 B13 B02 B03
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from megascale.catalog.schedules import group_sizes
from megascale.schedule.ir import Action, RankSchedule, backward, forward
from megascale.schedule.one_f_one_b import alternate, one_f_one_b


def interleaved_1f1b(p: int, v: int, m: int, rank: int) -> RankSchedule:
    """List the actions of `rank` of p, with v chunks per rank, for m micro-batches; with v = 1, the 1F1B schedule.

    The bubble is (p - 1) / (v m) of the compute time for m >= p.
    """
    if v == 1:
        return one_f_one_b(p, v, m, rank)
    # Every rank before the last needs two more warm-up forwards per hop: the activation goes to the last rank, and the
    # gradient comes back.
    forwards, backwards, first = interleave(p, v, m)
    return alternate(forwards, backwards, warmup=first + 2 * (p - rank - 1))


def combined_1f1b(p: int, v: int, m: int, rank: int) -> RankSchedule:
    """List the actions of `rank` of p, with v chunks per rank, for m micro-batches. The bubble is that of interleaved
    1F1B, and p + p / v micro-batches are live.
    """
    forwards, backwards, first = interleave(p, v, m)
    return alternate(forwards, backwards, warmup=first + 2 * (p - rank - 1) + 1, pairs=True)


def interleave(p: int, v: int, m: int) -> tuple[list[Action], list[Action], int]:
    """Return the forwards and the backwards of m micro-batches, each in their order, in groups, equal on all p ranks;
    and the number of forwards before the first one of the last chunk, after which the last rank starts backward.
    """
    sizes = group_sizes(p, m)
    groups = [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]
    forwards = [forward(chunk, i) for group in groups for chunk in range(v) for i in group]
    backwards = [backward(chunk, i) for group in groups for chunk in reversed(range(v)) for i in group]
    return forwards, backwards, (v - 1) * sizes[0]
