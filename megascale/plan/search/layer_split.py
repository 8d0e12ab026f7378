"""Splits of a model's layers over virtual stages by time (`balanced`): embedding, head and the layers after it count,
and so do layers of several kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balanced(
    seconds: Sequence[float], first: float, last: float, stages: int, slowness: Sequence[float] = ()
) -> list[int]:
    """Count the layers of each stage so that the slowest stage is as fast as possible. `seconds`: of the layers in
    order; `first`, `last`: what the first and the last stage take beside them. Only these two may have no layer.
    `slowness`: by stage, the seconds of equal work, by default equal.
    """
    until = [0.0, *accumulate(seconds)]
    best = {0: (0.0, 0.0, [0] * 0)}  # by layers of the stages so far: the slowest, the sum of squares, their layers
    for stage in range(stages):
        end = first * (stage == 0) + last * (stage == stages - 1)
        reached = dict[int, tuple[float, float, list[int]]]()
        for before, (slowest, squares, sizes) in best.items():
            for after in range(before + (0 < stage < stages - 1), len(until)):
                taken = (until[after] - until[before] + end) * (slowness[stage] if slowness else 1.0)
                found = max(slowest, taken), squares + taken**2
                if after not in reached or found < reached[after][:2]:
                    reached[after] = *found, [*sizes, after - before]
        best = reached
    return best[len(seconds)][2]
