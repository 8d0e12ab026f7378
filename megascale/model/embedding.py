"""Token and position embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megascale.layout.sequence_shard import TokenSpan, cut
from megascale.layout.tensors import TOKEN_EMBEDDING
from megascale.model.modules import LayerContext, residual_dropout
from megascale.ops.embedding_rows import lookup
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.vocabulary import VocabularyRange, vocab_parallel_embedding


class Embedding(nn.Module):
    """Token embedding, sharded over tp by vocabulary rows, times `model.embedding_scale`, plus learned positions if the
    model has them. `place`: the name of its dropout. In vocabulary parallelism over pp it has no rows.
    """

    def __init__(self, context: LayerContext, vocabulary: VocabularyRange, place: str = "embedding") -> None:
        super().__init__()
        self.token = context.parameters.get(TOKEN_EMBEDDING)
        self.position = context.parameters.get("embedding.position.weight")
        self._vocabulary = vocabulary
        self._tp = context.tp
        self._scale = context.model.embedding_scale
        self._drop = lambda x, batch: residual_dropout(x, batch, place, context)

    def forward(self, tokens_sb: Tensor, batch: MicroBatch, rows_sbh: Tensor | None = None) -> Tensor:
        """Map tokens [s, b] to [s, b, h], or [s / tp, b, h] with sequence parallelism. `rows_sbh`: their rows, if it
        has none.
        """
        if rows_sbh is None:
            assert self.token is not None, "a stage without rows is given those of the tokens"
            rows_sbh = vocab_parallel_embedding(tokens_sb, self.token, self._vocabulary, self._tp)
        x_sbh = rows_sbh
        if self._scale != 1:
            # rounded to the dtype of the result, as transformers does for Gemma
            x_sbh = x_sbh * float(torch.tensor(self._scale, dtype=x_sbh.dtype))
        if self.position is not None:
            rows = x_sbh.shape[0]
            first = self._tp.index * rows if rows < tokens_sb.shape[0] else 0
            x_sbh = x_sbh + self._positions(slice(first, first + rows), batch)
        x_sbh = self._drop(x_sbh, batch)
        # Of frozen tables too: backward passes the boundaries of buckets along the graph.
        return x_sbh.requires_grad_() if torch.is_grad_enabled() and not x_sbh.requires_grad else x_sbh

    def _positions(self, rows: slice, batch: MicroBatch) -> Tensor:
        """The position embedding of rows of the batch's tokens [rows, b or 1, h]."""
        assert self.position is not None
        spans = None if batch.shard is None else cut(batch.shard.spans, rows.start, rows.stop)
        if batch.boundaries is not None:
            return lookup(self.position, batch.boundaries.positions_in(spans or (TokenSpan(rows.start, rows.stop),)))
        if spans is None:
            return self.position[rows].unsqueeze(1)
        return torch.cat([self.position[slice(*span)] for span in spans]).unsqueeze(1)
