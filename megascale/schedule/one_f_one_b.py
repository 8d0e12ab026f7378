"""1F1B: one forward, one backward (PipeDream-Flush; Narayanan et al. 2021). At most p micro-batches are alive."""

from __future__ import annotations

from megascale.schedule.ir import Order, Schedule, backward, forward


def one_f_one_b(p: int, v: int, m: int) -> Schedule:
    """Orders of p ranks for m micro-batches; v must be 1. Bubble (p - 1) / m of the work; min(m, p - rank) live."""
    if v != 1:
        raise ValueError(f"1f1b runs one chunk on each rank, not {v}")
    forwards = [forward(0, i) for i in range(m)]
    backwards = [backward(0, i) for i in range(m)]
    return [alternate(forwards, backwards, warmup=p - rank - 1) for rank in range(p)]


def alternate(forwards: Order, backwards: Order, warmup: int) -> Order:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    order = forwards[:warmup]
    for f, b in zip(forwards[warmup:], backwards, strict=False):
        order += (f, b)
    return order + backwards[len(forwards) - warmup :]
