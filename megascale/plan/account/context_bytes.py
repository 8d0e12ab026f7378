"""Bytes that context parallelism sends per rank and layer, by mode (`context_bytes`).

For N tokens on P ranks, B bytes an element, h and k elements of all query heads and of all key-value heads:

    ulysses     all-to-all of q, k, v and of the result: (2 h + 2 k) N / P, of which (P - 1) / P leave the rank; without
                grouped queries 4 N h / P (Jacobs et al. 2023). More ranks than key-value heads replicate these: k is
                then P heads.
    ring        P - 1 blocks of keys and values: 2 k (P - 1) N / P (Liu et al. 2023)
    allgather   the same bytes at once, and all keys and values in memory

A backward of Ulysses sends as much as its forward. A ring's backward sends the blocks again, and their gradients, which
take a hop more to return; the all-gather is repeated, and the gradients are reduce-scattered. Gradients of keys and
values are sums over ranks, in the accumulation dtype.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

ContextMode = Literal["ulysses", "ring", "allgather"]
CONTEXT_MODES: tuple[ContextMode, ...] = get_args(ContextMode)


class Heads(NamedTuple):
    """Query heads and key-value heads of a tensor-parallel rank, elements of a head, and bytes of an element in compute
    and in accumulation.
    """

    queries: int
    keys: int
    width: int
    compute: int
    accumulate: int


def context_bytes(mode: ContextMode, tokens: float, ranks: int, heads: Heads) -> tuple[float, float]:
    """Count the bytes that a rank sends in a layer's forward and backward for a sequence of `tokens`."""
    if mode == "ulysses":
        replicated = max(heads.keys, ranks) if ranks > 1 else heads.keys
        held = (2 * heads.queries + 2 * replicated) * heads.width * tokens / ranks * heads.compute
        sent = held * (ranks - 1) / ranks
        return sent, sent
    elements, hops = 2 * heads.keys * heads.width * tokens / ranks, ranks - 1
    block, gradient = elements * heads.compute, elements * heads.accumulate
    returned = hops if mode == "allgather" or ranks == 1 else ranks
    return hops * block, hops * block + returned * gradient
