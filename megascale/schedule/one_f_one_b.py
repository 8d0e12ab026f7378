"""1F1B: one forward, one backward (PipeDream-Flush; Narayanan et al. 2021). At most p micro-batches are alive."""

from __future__ import annotations

from itertools import chain

from megascale.schedule.ir import Order, backward, forward


def one_f_one_b(p: int, v: int, m: int, rank: int) -> Order:
    """List the actions of `rank` of p for m micro-batches; v must be 1. The bubble is (p - 1) / m of the work, and
    min(m, p - rank) micro-batches are alive.

    Raises: ValueError for v > 1
    """
    if v != 1:
        raise ValueError(f"1f1b runs one chunk on each rank, not {v}")
    forwards, backwards = [forward(0, i) for i in range(m)], [backward(0, i) for i in range(m)]
    return alternate(forwards, backwards, warmup=p - rank - 1)


def alternate(forwards: Order, backwards: Order, warmup: int) -> Order:
    """Order as many forwards as backwards: `warmup` forwards, then one forward and one backward in turn, then the
    remaining backwards.
    """
    steady = zip(forwards[warmup:], backwards, strict=False)
    return [*forwards[:warmup], *chain.from_iterable(steady), *backwards[max(0, len(forwards) - warmup) :]]
