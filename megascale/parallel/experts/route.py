"""The experts that the tokens of a micro-batch have chosen in a layer: chosen once, and kept for recomputation, where a
rounding difference could choose others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from megascale.parallel.experts.exchange import Exchange


@dataclass
class Route:
    """Chosen `experts` [t, k], their `exchange`, and `counts` [experts], i64: this rank's slots of each expert.

    After `release` only the counts are left, for the totals of the step.
    """

    experts: Tensor | None
    exchange: Exchange | None
    counts: Tensor

    def release(self) -> None:
        """Free all but the counts, after the last use."""
        self.experts = self.exchange = None
