"""GPipe: all forwards, then all backwards (Huang et al. 2019). Every micro-batch is alive at once."""

from __future__ import annotations

from megascale.schedule.ir import backward, forward
from megascale.schedule.runs import ByRank, InRuns, Run


@InRuns
def gpipe(p: int, v: int, m: int) -> ByRank:
    """Orders of p ranks for m micro-batches; v must be 1. Bubble (p - 1) / m of the work."""
    if v != 1:
        raise ValueError(f"gpipe runs one chunk on each rank, not {v}")
    return lambda rank: [Run((forward(0, 0),), m), Run((backward(0, 0),), m)]
