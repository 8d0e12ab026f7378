"""Zero-bubble schedules: a backward is split into the gradient of the input, I, and those of the weights, W, which wait
for the bubbles (Qi et al. 2023). Contributions to a weight's gradient ascend in micro-batches, as in 1F1B.

ZB-H1 by rank, p = 3 ranks and m = 4 micro-batches:

    rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 .  I2 W2 .  I3 W3
"""

from __future__ import annotations

from megascale.schedule.interleaved import interleave
from megascale.schedule.ir import Action, Kind, RankSchedule


def interleaved_zb(p: int, v: int, m: int, rank: int) -> RankSchedule:
    """List the actions of `rank` of p, with v chunks per rank, for m micro-batches; with v = 1, those of ZB-H1.

    There are fewer forwards ahead than in interleaved 1F1B, as input gradients come back sooner; rank r delays the
    weights' gradients by r. With times F, I, W of a rank the bubble is (p - 1)(F + I - W) / v, and p micro-batches are
    live on every rank.
    """
    forwards, backwards, first = interleave(p, v, m)
    warmup = first + p - 1 - rank
    order, ahead, left = RankSchedule(forwards[:warmup]), forwards[warmup:], list[Action]()
    for action in backwards:
        order += [ahead.pop(0)] if ahead else []
        order.append(action._replace(kind=Kind.I))
        left.append(action._replace(kind=Kind.W))
        order += [left.pop(0)] if len(left) > rank else []
    return [*order, *left]
