"""What every stage of a pipeline is told about a micro-batch."""

from __future__ import annotations

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
