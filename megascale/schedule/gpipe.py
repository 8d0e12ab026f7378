"""GPipe: all forwards, then all backwards (Huang et al. 2019). Every rank holds activations of all micro-batches.

Time by rank, p = 3 ranks and m = 4 micro-batches; F0: forward of micro-batch 0; B0: backward, twice as long:

    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3---
    rank 1  .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .
    rank 2  .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .
"""

from __future__ import annotations

from megascale.schedule.ir import RankSchedule, backward, forward


def gpipe(p: int, v: int, m: int, rank: int) -> RankSchedule:
    """List the actions of `rank` of p for m micro-batches; v is 1. The bubble is (p - 1) / m of the compute time."""
    return [*(forward(0, i) for i in range(m)), *(backward(0, i) for i in range(m))]
