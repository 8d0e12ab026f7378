"""GPipe: all forwards, then all backwards (Huang et al. 2019). Every micro-batch is alive at once."""

from __future__ import annotations

from megascale.schedule.ir import Order, backward, forward


def gpipe(p: int, v: int, m: int, rank: int) -> Order:
    """List the actions of `rank` of p for m micro-batches; v must be 1. The bubble is (p - 1) / m of the work.

    Raises: ValueError for v > 1
    """
    if v != 1:
        raise ValueError(f"gpipe runs one chunk on each rank, not {v}")
    return [forward(0, i) for i in range(m)] + [backward(0, i) for i in range(m)]
