"""GPipe: all forwards, then all backwards (Huang et al. 2019). Every micro-batch is alive at once."""

from __future__ import annotations

from megascale.schedule.ir import Schedule, backward, forward


def gpipe(p: int, v: int, m: int) -> Schedule:
    """Orders of p ranks for m micro-batches; v must be 1. Bubble (p - 1) / m of the work."""
    if v != 1:
        raise ValueError(f"gpipe runs one chunk on each rank, not {v}")
    forwards = [forward(0, i) for i in range(m)]
    backwards = [backward(0, i) for i in range(m)]
    return [forwards + backwards for _ in range(p)]
