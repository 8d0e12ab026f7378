"""Linear attention with decay (MiniMax-01, Li et al. 2025), as `layout.parts.linear_attention` describes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megascale.catalog.layers import NORMS
from megascale.layout.sequence_shard import TokenSpan
from megascale.model.modules import LayerContext, Linear, Norm
from megascale.ops.linear_attention import decay_rates
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.recompute import Recomputation, recompute_in_backward
from megascale.parallel.segments import Steps, run_through
from megascale.parallel.sharded_norm import sharded_rms_norms
from megascale.parallel.state_exchange import GatheredStates, StateExchange, StoredStates, linear_attention
from megascale.parallel.tensor import column_parallel_steps, row_parallel_steps
from megascale.record.label import Label


class LightningAttention(nn.Module):
    """A column-parallel layer to q, k, v and a gate, linear attention of this rank's heads without rotary embeddings, a
    norm over all heads, the gate, and a row-parallel output layer.
    """

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__()
        name = f"layers.{index}.attention"
        self.qkv, self.out = (Linear(context, f"{name}.{part}") for part in ("qkv", "out"))
        self.norm = Norm(context, f"{name}.norm")
        self._model, self._tp, self._cp = context.model, context.tp, context.cp
        self._heads = context.model.num_heads // context.tp.size
        self._recompute = context.recompute.attention
        self._index = index
        self._labels = {part: Label.for_layer(index, part) for part in ("qkv", "states", "attention norm", "out")}

    def steps(
        self,
        x_sbh: Tensor,
        batch: MicroBatch,
        recompute_input: Recomputation | None = None,
        compute_output: bool = True,
    ) -> Steps[Tensor]:
        """As in `Attention.steps`."""
        layers = [self.qkv.params.of(batch)]
        (projected,) = yield from column_parallel_steps(x_sbh, layers, self._tp, self._labels["qkv"], recompute_input)
        core = lambda projected: self._core(projected, batch)  # noqa: E731
        heads = recompute_in_backward(core, projected) if self._recompute else core(projected)
        rows = [heads], [self.out.params.of(batch)]
        return (yield from row_parallel_steps(*rows, self._tp, self._labels["out"], compute_output=compute_output))

    forward = run_through(steps)

    def _core(self, projected: Tensor, batch: MicroBatch) -> Tensor:
        """Map q, k, v and the gate of this rank's heads [s, b, 4 x heads x d] to their result [s, b, heads x d]."""
        m, width = self._model, self._heads * self._model.head_dim
        qkv, gate = projected.split([3 * width, width], -1)
        first = self._tp.index * self._heads
        wide = torch.empty(0, dtype=torch.promote_types(qkv.dtype, torch.float32), device=qkv.device)
        rates = decay_rates(range(first, first + self._heads), m.num_heads, self._index, m.num_layers, wide)
        documents = None if batch.boundaries is None else batch.boundaries.documents
        spans = (TokenSpan(0, len(qkv)),) if batch.shard is None else batch.shard.spans
        by_head = qkv.unflatten(-1, (3, self._heads, m.head_dim))
        heads = linear_attention(by_head, spans, rates, documents, self._exchange(batch))
        offset = NORMS[m.norm].facts["offset"]
        label = self._labels["attention norm"]
        (normed,) = sharded_rms_norms([heads.flatten(2)], [self.norm.weight], m.norm_eps, self._tp, label, offset)
        return torch.sigmoid(gate) * normed

    def _exchange(self, batch: MicroBatch) -> StateExchange:
        """The states that come from other ranks, or from other chunks."""
        if batch.shard is None:
            return StateExchange()
        if batch.keys is not None:
            return StoredStates(batch.keys, batch.shard, self._index)
        assert self._cp is not None, "ranks that share sequences exchange states"
        return GatheredStates((self._cp.heads, self._cp.keys), batch.shard, self._labels["states"])
