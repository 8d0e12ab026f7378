"""Causal self-attention with grouped query heads (GQA, Ainslie et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megascale.model.modules import LayerContext, Linear
from megascale.model.query_norm import QueryKeyNorms
from megascale.ops.core_attention import AttentionMask
from megascale.ops.rope import layer_rope, rope_at, rope_table
from megascale.parallel.kv_exchange import KVExchange, attend_to_all, whole_keys
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.recompute import Recomputation, recompute_in_backward
from megascale.parallel.segments import Steps, run_through
from megascale.parallel.tensor import column_parallel_steps, row_parallel_steps
from megascale.record.label import Label


class Attention(nn.Module):
    """Self-attention: a column-parallel QKV layer, core attention of this rank's heads, a row-parallel output layer."""

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__()
        name = f"layers.{index}.attention"
        self.out = Linear(context, f"{name}.out")
        self._model = model = context.model
        self._tp = tp = context.tp
        self._cp = context.cp
        self._attend = context.operators.attend
        self._partial_attend = context.operators.partial_attend
        self._rotate = context.operators.rotate
        self._reach = model.windows[index]
        self.sinks = context.parameters.get(f"{name}.sinks")
        self._rope_and_attend = context.operators.compile_fn(self.rope_and_attend)
        self._recompute = context.recompute.attention
        self._place = name
        self._index = index
        self._qkv_label, self._out_label = (Label.for_layer(index, part) for part in ("qkv", "out"))
        self._heads = model.num_heads // tp.size
        self._kv_heads = model.num_kv_heads // tp.size
        self._numbers = range(tp.index * self._heads, (tp.index + 1) * self._heads)
        self._counts = [self._heads, self._kv_heads, self._kv_heads]
        self._add_projections(context)

    def _add_projections(self, context: LayerContext) -> None:
        self.qkv = Linear(context, f"{self._place}.qkv")
        has_norms = context.model.qk_norm != "none"
        self.norms = QueryKeyNorms(context, self._place, self._index) if has_norms else None

    def steps(
        self,
        x_sbh: Tensor,
        batch: MicroBatch,
        recompute_input: Recomputation | None = None,
        compute_output: bool = True,
    ) -> Steps[Tensor]:
        """Map x [s, b, h] to [s, b, h], s / tp with sequence parallelism. `recompute_input` recomputes x for wgrad;
        `compute_output` as in `row_parallel_steps`.
        """
        heads = yield from self.attend(x_sbh, batch, recompute_input)
        rows = [heads], [self.out.params.of(batch)]
        return (yield from row_parallel_steps(*rows, self._tp, self._out_label, compute_output=compute_output))

    forward = run_through(steps)

    def attend(self, x_sbh: Tensor, batch: MicroBatch, recompute_input: Recomputation | None) -> Steps[Tensor]:
        """Map x [s, b, h] to the result of this rank's heads [s, b, ...]. `recompute_input` as in `forward`."""
        (qkv,) = yield from self.project(x_sbh, batch, recompute_input)
        return self.core_attention(qkv, batch)

    def project(
        self, x_sbh: Tensor, batch: MicroBatch, recompute_input: Recomputation | None = None
    ) -> Steps[tuple[Tensor, ...]]:
        """Map x [s, b, h] to this rank's q, k and v [s, b, ...]. `recompute_input` as in `forward`."""
        layers = [self.qkv.params.of(batch)]
        return column_parallel_steps(x_sbh, layers, self._tp, self._qkv_label, recompute_input)

    def core_attention(self, qkv: Tensor, batch: MicroBatch) -> Tensor:
        """Map this rank's q, k and v [s, b, ...] to attention output [s, b, heads x head_dim], perhaps recomputed."""
        if not self._recompute:
            return self._core_attention(qkv, batch)
        return recompute_in_backward(lambda qkv: self._core_attention(qkv, batch), qkv)

    def _core_attention(self, qkv: Tensor, batch: MicroBatch) -> Tensor:
        s, b, _ = qkv.shape
        heads = qkv.view(s, b, -1, self._model.head_dim)
        parts = [heads]
        if self.norms is not None:
            q, k, v = heads.split(self._counts, dim=2)
            parts = [*self.norms(q, k), v]
        return self._attend_in_place(parts, batch)

    def _attend_in_place(self, parts: Sequence[Tensor], batch: MicroBatch) -> Tensor:
        """Attend with `parts` as in `rope_and_attend`, at the positions of a batch."""
        s, angles = parts[0].shape[0], None
        if self._model.position == "rope":
            angles = self._angles(s, batch, parts[0])
        keep = batch.dropout.attention_keep_mask(self._place, self._numbers, s)
        # not compiled: a graph would be compiled for the documents of every row, and broken by communication or blocks
        in_blocks = self.sinks is not None or (self._model.sparse_attention and self._reach)
        if batch.boundaries is not None or batch.shard is not None or in_blocks:
            return self.rope_and_attend(parts, angles, keep, batch)
        return self._rope_and_attend(parts, angles, keep)

    def _angles(self, s: int, batch: MicroBatch, x: Tensor) -> tuple[Tensor, Tensor]:
        """The angles of rope for the s tokens of a batch, on the device of x and in fp32 or wider."""
        rope, wide = layer_rope(self._model, self._index), torch.promote_types(x.dtype, torch.float32)
        spans = None if batch.shard is None else batch.shard.spans
        # frequencies may depend on the length of the run's sequences, of which this may be a part
        length = s if batch.shard is None and batch.boundaries is None else self._model.seq_length
        if batch.boundaries is None:
            return rope_table(length, rope, wide, x.device, spans)
        return rope_at(batch.boundaries, rope, rope_table(length, rope, wide, x.device, None), spans)

    def rope_and_attend(
        self,
        parts: Sequence[Tensor],
        angles: tuple[Tensor, Tensor] | None,
        keep: Tensor | None,
        batch: MicroBatch | None = None,
    ) -> Tensor:
        """Rotate q and k by `angles`, and attend with the dropout mask `keep`: the compiled part of core attention.

        `parts` [s, b, heads, head_dim]: q, k and v in one tensor, or in three. `batch`: with documents, or a part of
        its sequences.
        """
        if angles is not None:
            turned = [self._heads + self._kv_heads] if len(parts) == 1 else self._counts[:2]
            rotated = [self._rotate(part, count, *angles) for part, count in zip(parts, turned, strict=False)]
            parts = [*rotated, *parts[len(turned) :]]
        q, k, v = parts[0].split(self._counts, dim=2) if len(parts) == 1 else parts
        boundaries, shard = (None, None) if batch is None else (batch.boundaries, batch.shard)
        mask = AttentionMask(self._reach, boundaries, keep, self._model.dropout, self._numbers)
        if shard is not None and self._cp is not None:
            return self._join(self._cp.attention(q, k, v, mask, shard, self._index, self.sinks))
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        exchange: KVExchange | None = None
        if batch is not None and batch.keys is not None:
            assert shard is not None, "a chunk has a place in its sequence"
            exchange = batch.keys.exchange(shard, mask, self._index)
        elif self.sinks is not None:
            exchange = whole_keys(q.shape[2], mask, self._index)
        if exchange is not None:
            assert self._partial_attend is not None, "chunks and sinks need the log-sum-exp of scores"
            out_bhsd = attend_to_all(q, k, v, exchange, self._partial_attend, self.sinks)
        else:
            out_bhsd = self._attend(q, k, v, mask)
        return self._join(out_bhsd.permute(2, 0, 1, 3))

    def _join(self, out_sbnd: Tensor) -> Tensor:
        """Return the heads of attention's result [s, b, heads, d] side by side."""
        return out_sbnd.flatten(2)
