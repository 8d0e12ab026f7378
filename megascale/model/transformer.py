"""A stage of the transformer: the embedding if it is the first, its layers, the loss if it is the last."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from megascale.catalog.layers import BLOCKS
from megascale.config.model import ModelConfig
from megascale.layout.tensors import TOKEN_EMBEDDING, padded_vocab
from megascale.model.embedding import Embedding
from megascale.model.parts import Norm, Parameters
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.overlap import TensorAxis
from megascale.parallel.tensor import column_linear
from megascale.parallel.vocabulary import VocabularyRange, cross_entropy_sum


class Head(nn.Module):
    """The final norm and the projection to the vocabulary, whose weight may be the token embedding's."""

    def __init__(
        self, model: ModelConfig, parameters: Parameters, vocabulary: VocabularyRange, axis: TensorAxis
    ) -> None:
        super().__init__()
        self.norm = Norm(model, parameters, "final_norm")
        self.weight = parameters[TOKEN_EMBEDDING if model.tie_embeddings else "head.weight"]
        self._vocabulary = vocabulary
        self._axis = axis

    def logits(self, x_sbh: Tensor) -> Tensor:
        """This rank's columns of the logits, [s, b, rows of the weight]; columns beyond the vocabulary are padding."""
        return column_linear(self.norm(x_sbh), self.weight, None, self._axis, "head", keep=True)

    def forward(self, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
        """The sum of the losses of the micro-batch's tokens."""
        if batch.labels is None:
            raise ValueError("the last stage needs labels")
        return cross_entropy_sum(self.logits(x_sbh), batch.labels, batch.mask, self._vocabulary, self._axis)


class Stage(nn.Module):
    """One virtual pipeline stage. `forward` takes the boundary activation (None on the first stage) and returns the
    next one, or on the last stage the sum of the losses.

    `cross` is given the name and the input of each unit (`layout.chunks.unit`) after an embedding, and passes the input
    on.
    """

    def __init__(
        self, model: ModelConfig, parameters: Parameters, layers: range, first: bool, last: bool, axis: TensorAxis,
        cross: Callable[[str, Tensor], Tensor] = lambda unit, x: x,
    ) -> None:  # fmt: skip
        super().__init__()
        self._cross = cross
        vocabulary = VocabularyRange.of(model.vocab_size, padded_vocab(model, axis.size), axis)
        self.embedding = Embedding(model, parameters, vocabulary, axis) if first else None
        block = BLOCKS[model.block].load()
        self.layers = nn.ModuleDict({str(index): block(model, parameters, index, axis) for index in layers})
        self.head = Head(model, parameters, vocabulary, axis) if last else None

    def hidden(self, x_sbh: Tensor | None, batch: MicroBatch) -> Tensor:
        """The residual stream after this stage's layers."""
        if self.embedding is not None:
            if batch.tokens is None:
                raise ValueError("the first stage needs tokens")
            x_sbh = self.embedding(batch.tokens, batch)
        assert x_sbh is not None, "a stage after the first is given the activation of the one before it"
        for index, block in self.layers.items():
            x_sbh = block(self._cross(f"layers.{index}", x_sbh), batch)
        return x_sbh

    def forward(self, x_sbh: Tensor | None, batch: MicroBatch) -> Tensor:
        x_sbh = self.hidden(x_sbh, batch)
        return x_sbh if self.head is None else self.head(self._cross("head", x_sbh), batch)
