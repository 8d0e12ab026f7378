"""1F1B: one forward, one backward (PipeDream-Flush; Narayanan et al. 2021). At most p micro-batches are alive."""

from __future__ import annotations

from megascale.schedule.ir import backward, forward
from megascale.schedule.runs import ByRank, InRuns, Run, alternate


@InRuns
def one_f_one_b(p: int, v: int, m: int) -> ByRank:
    """Orders of p ranks for m micro-batches; v must be 1. Bubble (p - 1) / m of the work; min(m, p - rank) live."""
    if v != 1:
        raise ValueError(f"1f1b runs one chunk on each rank, not {v}")
    forwards, backwards = [Run((forward(0, 0),), m)], [Run((backward(0, 0),), m)]
    return lambda rank: alternate(forwards, backwards, warmup=p - rank - 1)
