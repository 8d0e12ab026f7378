"""The samples of a step on one rank, by micro-batch: what every stage of a pipeline is told about each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megascale.parallel.rng import Dropout


@dataclass(frozen=True)
class MicroBatch:
    """tokens and labels [s, b], i64, on the stages that need them; `mask` [s, b] is 1 for labels that count in the
    loss, None if all do.
    """

    tokens: Tensor | None
    labels: Tensor | None
    mask: Tensor | None
    dropout: Dropout


@dataclass(frozen=True)
class StepBatch:
    """A step's samples on this rank. `tokens`: labels that count in the loss, over this rank's micro-batches."""

    micro_batches: Sequence[MicroBatch]
    tokens: int

    def micro_batch(self, index: int) -> MicroBatch:
        return self.micro_batches[index]
