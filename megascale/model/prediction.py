"""Multi-token prediction (DeepSeek-V3, 2.2): the layer of a depth, which predicts one token further ahead."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megascale.catalog.layers import BLOCKS
from megascale.comm.group import single_rank_group
from megascale.model.embedding import Embedding
from megascale.model.modules import LayerContext, Norm
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.tensor import column_parallel_linear
from megascale.parallel.tp_overlap import LinearParams, TensorParallel
from megascale.parallel.vocabulary import VocabularyRange


class PredictionLayer(nn.Module):
    """h_d = norm(block(W [norm(embedding of token t + d); norm(h_d-1 of token t)])), the input of the shared head.

    h_0 is the result of the model's final norm. `index`: the number of the block, after those of the model.
    """

    def __init__(self, context: LayerContext, index: int, vocabulary: VocabularyRange) -> None:
        super().__init__()
        name, model = f"layers.{index}", context.model
        self.index = index
        self._depth = index - model.num_layers  # from 0
        self.embedding = Embedding(context, vocabulary, f"{name}.embedding")
        self.embedding_norm = Norm(context, f"{name}.embedding_norm")
        self.hidden_norm = Norm(context, f"{name}.hidden_norm")
        self.merge = context.parameters[f"{name}.merge.weight"]
        self._alone = TensorParallel(single_rank_group("tp"))  # each rank merges its tokens by the whole weight
        self.block = BLOCKS[model.block].load()(context, index)
        self.final_norm = Norm(context, f"{name}.final_norm")

    def forward(self, x_sbh: Tensor, batch: MicroBatch, compute_output: bool = True) -> Tensor:
        """Map h_d-1 [s, b, h] to h_d [s, b, h]. The last GEMM always runs: the norm after it saves its output."""
        tokens = batch.depths[self._depth - 1].labels if self._depth else batch.labels
        assert tokens is not None, "the last stage has labels, the tokens that the depth before predicts"
        embedded = self.embedding_norm(self.embedding(tokens, batch))
        pairs = torch.cat([embedded, self.hidden_norm(x_sbh)], -1)
        merged = column_parallel_linear(pairs, LinearParams(self.merge), self._alone)
        return self.final_norm(self.block(merged, batch))
