"""The experts that the tokens of a micro-batch have chosen in a layer: chosen once, and kept for recomputation, where a
rounding difference could choose others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from megascale.parallel.experts.dispatcher import Dispatcher


@dataclass
class ExpertChoice:
    """Chosen `experts` [t, k], the `dispatchers` of blocks of tokens, and `counts` [experts], i64: this rank's slots of
    each expert. `padding`: a mask [t, 1] of the tokens that go to no expert, whatever they have chosen. `losses`: this
    rank's parts of the router's losses, by name, without their weights.

    After `release` only counts and losses are left, for the totals of the step.
    """

    experts: Tensor | None
    dispatchers: tuple[Dispatcher, ...]
    counts: Tensor
    padding: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)

    def release(self) -> None:
        """Free all that is of tokens, after the last use."""
        self.experts, self.dispatchers, self.padding = None, (), None
