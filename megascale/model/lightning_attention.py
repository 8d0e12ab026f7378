"""Linear attention with decay (MiniMax-01, Li et al. 2025), as `layout.parts.linear_attention` describes it."""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.catalog.layers import NORMS
from megascale.layout.sequence_shard import whole_sequence
from megascale.model.attention import Attention
from megascale.model.modules import LayerContext, Linear, Norm
from megascale.ops.linear_attention import decay_rates
from megascale.parallel.kv_store import KVStore
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.sharded_norm import sharded_rms_norms
from megascale.parallel.state_exchange import GatheredStates, StateExchange, StoredStates, linear_attention
from megascale.record.label import Label


class LightningAttention(Attention):
    """A column-parallel layer to q, k, v and a gate, linear attention of this rank's heads without rotary embeddings, a
    norm over all heads, the gate, and a row-parallel output layer.
    """

    def _add_projections(self, context: LayerContext) -> None:
        self.qkv = Linear(context, f"{self._place}.qkv")
        self.norm = Norm(context, f"{self._place}.norm")

    def _core_attention(self, qkv: Tensor, batch: MicroBatch) -> Tensor:
        """Map q, k, v and the gate of this rank's heads [s, b, 4 x heads x d] to their result [s, b, heads x d]."""
        m, width = self._model, self._heads * self._model.head_dim
        qkv, gate = qkv.split([3 * width, width], -1)
        shard = batch.shard or whole_sequence(len(qkv))
        wide = torch.empty(0, dtype=torch.promote_types(qkv.dtype, torch.float32), device=qkv.device)
        rates = decay_rates(self._numbers, m.num_heads, self._index, m.num_layers, wide)
        documents = None if batch.boundaries is None else batch.boundaries.documents
        by_head = qkv.unflatten(-1, (3, self._heads, m.head_dim))
        exchange: StateExchange = StoredStates(batch.keys or KVStore(), shard, self._index)
        if self._cp is not None and batch.keys is None:  # of other ranks, not of other chunks of a sequence
            groups = self._cp.heads, self._cp.keys
            exchange = GatheredStates(groups, shard, Label.for_layer(self._index, "states"))
        heads = linear_attention(by_head, shard.spans, rates, documents, exchange)
        offset, label = NORMS[m.norm].facts["offset"], Label.for_layer(self._index, "attention norm")
        (normed,) = sharded_rms_norms([heads.flatten(2)], [self.norm.weight], m.norm_eps, self._tp, label, offset)
        return torch.sigmoid(gate) * normed
