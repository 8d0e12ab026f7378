"""A stage of the transformer: the embedding if it is the first, its layers, the loss if it is the last."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from megascale.catalog.layers import BLOCKS
from megascale.layout.tensors import HEAD, TOKEN_EMBEDDING, padded_vocab
from megascale.model.embedding import Embedding
from megascale.model.parts import Given, Norm
from megascale.parallel.cross_entropy import linear_cross_entropy
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.overlap import Layer
from megascale.parallel.recompute import recomputed
from megascale.parallel.tensor import column_linear
from megascale.parallel.vocabulary import VocabularyRange


class Head(nn.Module):
    """The final norm and the projection to the vocabulary, whose weight may be the token embedding's."""

    def __init__(self, given: Given, vocabulary: VocabularyRange) -> None:
        super().__init__()
        self.norm = Norm(given, "final_norm")
        self.weight = given.parameters[TOKEN_EMBEDDING if given.model.tie_embeddings else HEAD]
        self._vocabulary = vocabulary
        self._axis = given.axis
        self._cross_entropy = given.operators.cross_entropy

    def logits(self, x_sbh: Tensor) -> Tensor:
        """This rank's columns of all logits, [s, b, rows of the weight]; columns beyond the vocabulary are padding."""
        return column_linear(self.norm(x_sbh), Layer(self.weight), self._axis, "logits")

    def forward(self, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
        """The sum of the losses of the micro-batch's tokens."""
        if batch.labels is None:
            raise ValueError("the last stage needs labels")
        x_sbh, how = self.norm(x_sbh), (self._vocabulary, self._axis, self._cross_entropy)
        return linear_cross_entropy(x_sbh, self.weight, batch.labels, batch.mask, *how)


class Stage(nn.Module):
    """One virtual pipeline stage. `forward` takes the boundary activation (None on the first stage) and returns the
    next one, or on the last stage the sum of the losses.

    `cross` is given the name and the input of each unit (`layout.chunks.unit`) after an embedding, and passes the input
    on.
    """

    def __init__(
        self,
        given: Given,
        layers: range,
        first: bool,
        last: bool,
        cross: Callable[[str, Tensor], Tensor] = lambda unit, x: x,
    ) -> None:
        super().__init__()
        self._cross = cross
        self._recompute = given.recompute.full
        model, axis = given.model, given.axis
        vocabulary = VocabularyRange.of(model.vocab_size, padded_vocab(model, axis.size), axis)
        self.embedding = Embedding(given, vocabulary) if first else None
        block = BLOCKS[model.block].load()
        self.layers = nn.ModuleDict({str(index): block(given, index) for index in layers})
        self.head = Head(given, vocabulary) if last else None

    def hidden(self, x_sbh: Tensor | None, batch: MicroBatch) -> Tensor:
        """The residual stream after this stage's layers."""
        if self.embedding is not None:
            if batch.tokens is None:
                raise ValueError("the first stage needs tokens")
            x_sbh = self.embedding(batch.tokens, batch)
        assert x_sbh is not None, "a stage after the first is given the activation of the one before it"
        for index, block in self.layers.items():
            x_sbh = self._run(block, self._cross(f"layers.{index}", x_sbh), batch)
        return x_sbh

    def _run(self, block: nn.Module, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
        if not self._recompute:
            return block(x_sbh, batch)
        return recomputed(lambda x: block(x, batch), x_sbh, again=lambda x: block(x, batch, value=False))

    def forward(self, x_sbh: Tensor | None, batch: MicroBatch) -> Tensor:
        x_sbh = self.hidden(x_sbh, batch)
        return x_sbh if self.head is None else self.head(self._cross("head", x_sbh), batch)
