"""Tokens to vectors."""

from __future__ import annotations

from torch import Tensor, nn

from megascale.layout.tensors import TOKEN_EMBEDDING
from megascale.model.parts import Given, drop_branch
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.vocabulary import VocabularyRange, embed


class Embedding(nn.Module):
    """Token vectors, and learned position vectors where the model has them."""

    def __init__(self, given: Given, vocabulary: VocabularyRange) -> None:
        super().__init__()
        self.token = given.parameters[TOKEN_EMBEDDING]
        self.position = given.parameters.get("embedding.position.weight")
        self._vocabulary = vocabulary
        self._axis = given.axis
        self._drop = lambda x, batch: drop_branch(x, batch, "embedding", given)

    def forward(self, tokens_sb: Tensor, batch: MicroBatch) -> Tensor:
        """[s, b] to [s, b, h], or [s / tp, b, h] with sequence parallelism."""
        x_sbh = embed(tokens_sb, self.token, self._vocabulary, self._axis)
        if self.position is not None:
            rows = x_sbh.shape[0]
            first = self._axis.index * rows if rows < tokens_sb.shape[0] else 0
            x_sbh = x_sbh + self.position[first : first + rows].unsqueeze(1)
        return self._drop(x_sbh, batch)
