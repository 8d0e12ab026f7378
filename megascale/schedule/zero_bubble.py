"""Zero-bubble schedules on a loop: backward is split into the input gradient, I, which the rank before waits for, and
the weights' gradients, W, which fill the bubble (Qi et al. 2023, ZB-H1).

Time by rank, p = 3 ranks and m = 4 micro-batches, all actions equally long:

    rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
"""

from __future__ import annotations

from megascale.schedule.interleaved import chunk_passes
from megascale.schedule.ir import Kind, RankSchedule


def zb_h1(p: int, v: int, m: int, rank: int) -> RankSchedule:
    """List the actions of `rank` of p for m micro-batches; v must be 1.

    The bubble is (p - 1)(F + I - W), and activations of p micro-batches are live, on every rank.

    Raises: ValueError for v > 1
    """
    if v != 1:
        raise ValueError(f"zb_h1 has one model chunk per rank, not {v}: interleaved_zb has more")
    return interleaved_zb(p, v, m, rank)


def interleaved_zb(p: int, v: int, m: int, rank: int) -> RankSchedule:
    """List the actions of `rank` of p, with v chunks per rank, for m micro-batches: as interleaved 1F1B with fewer
    warm-up forwards, since a gradient comes back sooner, and at most `rank` pending W.

    The bubble is (p - 1)(F + I - W) / v for m >= p, and activations of p micro-batches of all chunks are live.
    """
    forwards, backwards, first_group = chunk_passes(p, v, m)
    warmup = min((v - 1) * first_group + p - 1 - rank, len(forwards))
    order, pending = forwards[:warmup], RankSchedule()
    ahead = iter(forwards[warmup:])
    for action in backwards:
        order += [following] if (following := next(ahead, None)) is not None else []
        order.append(action._replace(kind=Kind.I))
        pending.append(action._replace(kind=Kind.W))
        if len(pending) > rank:
            order.append(pending.pop(0))
    return order + pending
