"""Causal self-attention; query heads may share key-value heads (Ainslie et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megascale.config.model import ModelConfig
from megascale.model.parts import Linear, Parameters
from megascale.model.rope import rope_table, rotate_heads
from megascale.ops.attention import causal_attention
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.overlap import TensorAxis
from megascale.parallel.tensor import column_linear, row_linear


class Attention(nn.Module):
    """q, k and v by one column-parallel product, this rank's heads, and a row-parallel product back."""

    def __init__(self, model: ModelConfig, parameters: Parameters, index: int, axis: TensorAxis) -> None:
        super().__init__()
        name = f"layers.{index}.attention"
        self.qkv = Linear(parameters, f"{name}.qkv")
        self.out = Linear(parameters, f"{name}.out")
        self._model = model
        self._axis = axis
        self._place = name
        self._index = index
        self._heads = model.num_heads // axis.size
        self._kv_heads = model.num_kv_heads // axis.size

    def forward(self, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
        qkv = column_linear(x_sbh, *self.qkv.layer, self._axis, f"layer {self._index} qkv")
        return row_linear(self.core(qkv, batch), *self.out.layer, self._axis, f"layer {self._index} out")

    def core(self, qkv: Tensor, batch: MicroBatch) -> Tensor:
        """From this rank's q, k and v [s, b, ...] to what its heads attend to, [s, b, heads x head_dim]."""
        model, axis, d = self._model, self._axis, self._model.head_dim
        s, b, _ = qkv.shape
        heads = qkv.view(s, b, -1, d)
        if model.position == "rope":
            wide = torch.promote_types(qkv.dtype, torch.float32)
            table = rope_table(s, d, model.rope_theta, wide, qkv.device)
            heads = rotate_heads(heads, self._heads + self._kv_heads, *table)
        q, k, v = heads.permute(1, 2, 0, 3).split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        first = axis.index * self._heads
        keep = batch.dropout.attention(self._place, range(first, first + self._heads), s)
        out_bhsd = causal_attention(q, k, v, keep, model.dropout)
        return out_bhsd.permute(2, 0, 1, 3).reshape(s, b, -1)
