"""Seconds of a pipeline stage on sequences, forward and backward: linear in the tokens, attention in their square.

A rank that holds all of a sequence of s tokens takes a s + b s^2. In a ring of D ranks every rank has s / D tokens and
1 / D of the attention, under which D - 1 blocks of keys and values travel, s / D tokens each, and in backward their
gradients with them, which take a hop more to return to their rank:

    a s / D + max(b s^2 / D, (D - 1) (c s / D + latency)) + r s / D
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SequenceWork:
    """Coefficients in seconds: `linear` per token, `quadratic` per square token of causal attention, `sent` per token
    of keys and values, and of their gradients, sent to the next rank, `latency` per block sent, `returned` per token of
    gradients that return.
    """

    linear: float
    quadratic: float
    sent: float = 0.0
    latency: float = 0.0
    returned: float = 0.0

    def whole(self, length: float) -> float:
        """Time a sequence on one rank."""
        return (self.linear + self.quadratic * length) * length

    def chunk(self, start: int, stop: int) -> float:
        """Time the tokens [start, stop) of a sequence, which attend to all tokens before."""
        return self.linear * (stop - start) + self.quadratic * (stop * stop - start * start)

    def shared(self, lengths: Iterable[int], ranks: int) -> float:
        """Time a rank of a ring of `ranks`, over which every sequence is split evenly."""
        tokens = squares = 0
        for length in lengths:
            tokens, squares = tokens + length, squares + length * length
        hops = (ranks - 1) * (self.sent * tokens / ranks + self.latency)
        returned = self.returned if ranks > 1 else 0.0
        return (self.linear + returned) * tokens / ranks + max(self.quadratic * squares / ranks, hops)
