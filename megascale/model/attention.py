"""Causal self-attention; query heads may share key-value heads (Ainslie et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megascale.config.model import ModelConfig
from megascale.model.parts import Linear, Parameters
from megascale.model.rope import rope_table, rotate_heads
from megascale.ops.attention import causal_attention
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.tensor import TensorAxis, column_linear, row_linear


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
        self._heads = model.num_heads // axis.size
        self._kv_heads = model.num_kv_heads // axis.size

    def forward(self, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
        model, axis, d = self._model, self._axis, self._model.head_dim
        qkv = column_linear(x_sbh, self.qkv.weight, self.qkv.bias, axis)
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
        out = out_bhsd.permute(2, 0, 1, 3).reshape(s, b, -1)
        return row_linear(out, self.out.weight, self.out.bias, axis)
