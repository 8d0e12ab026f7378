"""Causal self-attention; query heads may share key-value heads (Ainslie et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megascale.core.label import Label
from megascale.model.parts import Given, Linear
from megascale.ops.rope import rope_table
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.recompute import Again, recomputed
from megascale.parallel.tensor import column_linear, row_linear


class Attention(nn.Module):
    """q, k and v by one column-parallel product, this rank's heads, and a row-parallel product back."""

    def __init__(self, given: Given, index: int) -> None:
        super().__init__()
        name = f"layers.{index}.attention"
        self.qkv = Linear(given, f"{name}.qkv")
        self.out = Linear(given, f"{name}.out")
        self._model = model = given.model
        self._axis = axis = given.axis
        self._attend = given.operators.attend
        self._rotate = given.operators.rotate
        self._window = model.windows[index]
        self._mix = given.operators.fuse(self.mix)
        self._recompute = given.recompute.attention
        self._place = name
        self._index = index
        self._heads = model.num_heads // axis.size
        self._kv_heads = model.num_kv_heads // axis.size

    def forward(self, x_sbh: Tensor, batch: MicroBatch, again: Again | None = None) -> Tensor:
        """`again`: forms x again."""
        qkv = column_linear(x_sbh, self.qkv.layer, self._axis, Label.of_layer(self._index, "qkv"), again)
        return row_linear(self.core(qkv, batch), self.out.layer, self._axis, Label.of_layer(self._index, "out"))

    def core(self, qkv: Tensor, batch: MicroBatch) -> Tensor:
        """From this rank's q, k and v [s, b, ...] to what its heads attend to, [s, b, heads x head_dim]."""
        if not self._recompute:
            return self._core(qkv, batch)
        return recomputed(lambda qkv: self._core(qkv, batch), qkv)

    def _core(self, qkv: Tensor, batch: MicroBatch) -> Tensor:
        model, s = self._model, qkv.shape[0]
        angles = None
        if model.position == "rope":
            wide = torch.promote_types(qkv.dtype, torch.float32)
            angles = rope_table(s, model.head_dim, model.rope_theta, wide, qkv.device)
        first = self._axis.index * self._heads
        keep = batch.dropout.attention(self._place, range(first, first + self._heads), s)
        return self._mix(qkv, angles, keep)

    def mix(self, qkv: Tensor, angles: tuple[Tensor, Tensor] | None, keep: Tensor | None) -> Tensor:
        """The operations of `core` that stand together: turn by `angles`, attend, keep what dropout keeps."""
        s, b, _ = qkv.shape
        heads = qkv.view(s, b, -1, self._model.head_dim)
        if angles is not None:
            heads = self._rotate(heads, self._heads + self._kv_heads, *angles)
        q, k, v = heads.permute(1, 2, 0, 3).split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        out_bhsd = self._attend(q, k, v, self._window, keep, self._model.dropout)
        return out_bhsd.permute(2, 0, 1, 3).reshape(s, b, -1)
