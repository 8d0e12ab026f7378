"""1F1B: one forward, one backward in turn (PipeDream-Flush; Narayanan et al. 2021). At most p micro-batches are live.

Time by rank, p = 3 ranks and m = 4 micro-batches; F0: forward of micro-batch 0; B0: backward, twice as long:

    rank 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
    rank 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
    rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .
            warm-up: p - rank - 1 forwards, then 1F1B, then backwards
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, starmap

from megascale.layout.stages import Placement
from megascale.schedule.ir import Action, Overlap, RankSchedule, backward, each_action, forward


def one_f_one_b(p: int, v: int, m: int, rank: int) -> RankSchedule:
    """List the actions of `rank` of p for m micro-batches; v is 1.

    The bubble is (p - 1) / m of the compute time, and min(m, p - rank) micro-batches are live.
    """
    forwards, backwards = [forward(0, i) for i in range(m)], [backward(0, i) for i in range(m)]
    return alternate(forwards, backwards, warmup=p - rank - 1)


def partial_1f1b(placement: Placement, m: int, rank: int) -> RankSchedule:
    """List the actions of `rank` for m micro-batches that skip stages: an order of all stages without those skipped, in
    which nothing deadlocks.

    For every stage until the last, `ahead` forwards come before the first backward: two or, if more than half is
    skipped, as many as leave each stage one of its own. With one as in 1F1B a micro-batch that finds a rank busy with
    another would hold up all stages. min(m, ahead (p - rank - 1) + 1) micro-batches are live, less those that skip the
    rank.
    """
    ahead, numbers = max(2, math.ceil(1 / (1 - placement.skip_ratio))), range(m)
    forwards, backwards = [forward(0, i) for i in numbers], [backward(0, i) for i in numbers]
    order = alternate(forwards, backwards, warmup=ahead * (placement.p - rank - 1))
    return [each for each in each_action(order) if placement.stage(rank, 0) in placement.path(each.microbatch)]


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int, *, pairs: bool = False
) -> RankSchedule:
    """Order equally many forwards and backwards: `warmup` forwards, then a forward and a backward in turn, or in
    `pairs`, then the remaining backwards.
    """
    steady = zip(forwards[warmup:], backwards, strict=False)
    between = starmap(Overlap, steady) if pairs else chain.from_iterable(steady)
    return [*forwards[:warmup], *between, *backwards[max(0, len(forwards) - warmup) :]]
