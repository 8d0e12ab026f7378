"""The samples of a step on one rank, as micro-batches: the data that pipeline stages read beside the activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megascale.ops.boundaries import Boundaries
from megascale.parallel.rng import Dropout


@dataclass(frozen=True)
class MicroBatch:
    """Tokens and labels [s, b], i64, on the stages that need them; `mask` [s, b] is 1 where a label counts in the loss,
    None if all labels count. `boundaries`: of documents, on every stage, with `data.mask = "document"`.
    """

    tokens: Tensor | None
    labels: Tensor | None
    mask: Tensor | None
    dropout: Dropout
    boundaries: Boundaries | None = None

    def release(self) -> None:
        """Free what layers have shared for this micro-batch, after its last use."""
        if self.boundaries is not None:
            self.boundaries.release()


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of a step on this rank. `loss_tokens`: the number of labels that count in the loss."""

    micro_batches: Sequence[MicroBatch]
    loss_tokens: int

    def micro_batch(self, index: int) -> MicroBatch:
        return self.micro_batches[index]
