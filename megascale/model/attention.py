"""Causal self-attention with grouped query heads (GQA, Ainslie et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megascale.core.label import Label
from megascale.model.modules import LayerContext, Linear
from megascale.ops.rope import layer_rope, rope_table
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.recompute import Recomputation, recompute_in_backward
from megascale.parallel.tensor import column_parallel_linear, row_parallel_linear


class Attention(nn.Module):
    """Self-attention: a column-parallel QKV layer, core attention of this rank's heads, a row-parallel output layer."""

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__()
        name = f"layers.{index}.attention"
        self.qkv = Linear(context, f"{name}.qkv")
        self.out = Linear(context, f"{name}.out")
        self._model = model = context.model
        self._tp = tp = context.tp
        self._attend = context.operators.attend
        self._rotate = context.operators.rotate
        self._window = model.windows[index]
        self._rope_and_attend = context.operators.compile_fn(self.rope_and_attend)
        self._recompute = context.recompute.attention
        self._place = name
        self._index = index
        self._heads = model.num_heads // tp.size
        self._kv_heads = model.num_kv_heads // tp.size

    def forward(self, x_sbh: Tensor, batch: MicroBatch, recompute_input: Recomputation | None = None) -> Tensor:
        """Map x [s, b, h] to [s, b, h], s / tp with sequence parallelism. `recompute_input` recomputes x for wgrad."""
        qkv = column_parallel_linear(
            x_sbh, self.qkv.params, self._tp, Label.for_layer(self._index, "qkv"), recompute_input
        )
        return row_parallel_linear(
            self.core_attention(qkv, batch), self.out.params, self._tp, Label.for_layer(self._index, "out")
        )

    def core_attention(self, qkv: Tensor, batch: MicroBatch) -> Tensor:
        """Map this rank's q, k and v [s, b, ...] to attention output [s, b, heads x head_dim], perhaps recomputed."""
        if not self._recompute:
            return self._core_attention(qkv, batch)
        return recompute_in_backward(lambda qkv: self._core_attention(qkv, batch), qkv)

    def _core_attention(self, qkv: Tensor, batch: MicroBatch) -> Tensor:
        model, s = self._model, qkv.shape[0]
        angles = None
        if model.position == "rope":
            wide = torch.promote_types(qkv.dtype, torch.float32)
            angles = rope_table(s, layer_rope(model, self._index), wide, qkv.device)
        first = self._tp.index * self._heads
        keep = batch.dropout.attention_keep_mask(self._place, range(first, first + self._heads), s)
        return self._rope_and_attend(qkv, angles, keep)

    def rope_and_attend(self, qkv: Tensor, angles: tuple[Tensor, Tensor] | None, keep: Tensor | None) -> Tensor:
        """Rotate q and k by `angles`, and attend with the dropout mask `keep`: the compiled part of core attention."""
        s, b, _ = qkv.shape
        heads = qkv.view(s, b, -1, self._model.head_dim)
        if angles is not None:
            heads = self._rotate(heads, self._heads + self._kv_heads, *angles)
        q, k, v = heads.permute(1, 2, 0, 3).split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        out_bhsd = self._attend(q, k, v, self._window, keep, self._model.dropout)
        return out_bhsd.permute(2, 0, 1, 3).reshape(s, b, -1)
