"""FLOPs per token of a block's parts, with attention by two conventions (`plan.account.flops`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Scores = Mapping[int | None, tuple[float, float]]
"""Scores of a head in the two conventions, full and causal, by the layer's window; None for full attention."""


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs per token. `linear`: GEMMs with weights, including the head; `full_attention`, `causal_attention`: the two
    GEMMs of attention, Q K^T and P V.
    """

    linear: float = 0.0
    full_attention: float = 0.0
    causal_attention: float = 0.0

    @property
    def full(self) -> float:
        """FLOPs with the full attention matrix, or the full window of every query."""
        return self.linear + self.full_attention

    @property
    def causal(self) -> float:
        """FLOPs with the unmasked scores only."""
        return self.linear + self.causal_attention

    def __add__(self, other: TokenFlops) -> TokenFlops:
        return TokenFlops(*map(sum, zip(vars(self).values(), vars(other).values(), strict=True)))
