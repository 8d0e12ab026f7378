"""Attention within the blocks of scores that heads see (`layout.sparse_blocks`), by any `PartialAttention`.

Where only some of the heads or keys count, they are gathered before the kernels, and gradients scattered after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale.config.sparse_pattern import Reach
from megascale.layout.sequence_shard import Spans
from megascale.layout.sparse_blocks import HeadBlocks, visible_blocks
from megascale.ops.boundaries import Boundaries
from megascale.ops.partial_attention import Accumulator, AttentionResult, Gradients, PartialAttention


def visible_within(
    queries: Spans, keys: Spans, reach: Reach | None, heads: range, boundaries: Boundaries | None, length: int
) -> tuple[HeadBlocks, ...]:
    """List what heads see between queries and keys of rows of `length`, once for all layers."""
    if boundaries is None:
        return _visible_in_rows(queries, keys, reach, heads)
    starts = boundaries.starts
    key = ("blocks", queries, keys, reach, heads)
    return boundaries.shared(key, lambda: visible_blocks(queries, keys, reach, heads, starts, length))


_visible_in_rows = lru_cache(256)(visible_blocks)


class _Place(NamedTuple):
    """The rows and heads of queries, and of keys the heads, repeated for queries that share them, and the tokens."""

    rows: slice
    heads: slice
    kv_heads: list[int]
    tokens: Tensor

    def gather(self, keys: Tensor) -> Tensor:
        of_rows = keys[self.rows]
        return torch.stack([of_rows[:, head].index_select(1, self.tokens) for head in self.kv_heads], 1)

    def scatter(self, grad: Tensor, into: Tensor) -> None:
        for head, part in zip(self.kv_heads, grad.unbind(1), strict=True):
            into[self.rows, head].index_add_(1, self.tokens, part)


def _place(seen: HeadBlocks, q: Tensor, k: Tensor) -> _Place | None:
    """Return the place of blocks; None for all of the tensors."""
    if seen.heads is None or seen.keys is None:
        return None
    spans, shared = seen.keys, q.shape[1] // k.shape[1]
    tokens = seen.blocks.derive(
        ("tokens", k.device), lambda: torch.cat([torch.arange(s.start, s.stop, device=k.device) for s in spans])
    )
    rows = slice(None) if seen.row is None else slice(seen.row, seen.row + 1)
    return _Place(rows, seen.heads, [head // shared for head in range(q.shape[1])[seen.heads]], tokens)


def add_forward(
    partial: PartialAttention, total: Accumulator, q: Tensor, k: Tensor, v: Tensor, visible: Sequence[HeadBlocks]
) -> None:
    """Add the attention of q [b, heads, n, d] to k and v [b, kv heads, m, d] within `visible`."""
    for seen in visible:
        if (at := _place(seen, q, k)) is None:
            partial.add_forward(total, q, k, v, seen.blocks)
        else:
            own = total.part(at.rows, at.heads)
            partial.add_forward(own, q[at.rows, at.heads], at.gather(k), at.gather(v), seen.blocks)


def add_backward(
    partial: PartialAttention,
    grads: Gradients,
    queries: AttentionResult,
    k: Tensor,
    v: Tensor,
    visible: Sequence[HeadBlocks],
) -> None:
    """Add the gradients of `add_forward` to `grads`, in fp32 or wider."""
    for seen in visible:
        if (at := _place(seen, queries.q, k)) is None:
            partial.add_backward(grads, queries, k, v, seen.blocks)
            continue
        keys, values = at.gather(k), at.gather(v)
        own = AttentionResult(*(t[at.rows, at.heads] for t in queries))
        found = Gradients(
            grads.q[at.rows, at.heads], *(t.new_zeros(t.shape, dtype=grads.k.dtype) for t in (keys, values))
        )
        partial.add_backward(found, own, keys, values, seen.blocks)
        at.scatter(found.k, grads.k)
        at.scatter(found.v, grads.v)


def attend_within(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, visible: Sequence[HeadBlocks], partial: PartialAttention
) -> Tensor:
    """Attend within `visible`, for q [b, heads, s, d] and k, v [b, kv heads, s, d]; result as q. Forward saves q, k, v,
    the result and a log-sum-exp per query; no tensor has the size of the scores.
    """
    return _AttentionWithin.apply(q_bhsd, k_bhsd, v_bhsd, visible, partial)


class _AttentionWithin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Sequence[HeadBlocks], partial: PartialAttention
    ) -> Tensor:
        total = Accumulator(q)
        add_forward(partial, total, q, k, v, visible)
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse)
        ctx.visible, ctx.partial = visible, partial
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        found = Gradients(*(torch.zeros(t.shape, dtype=lse.dtype, device=t.device) for t in (q, k, v)))
        add_backward(ctx.partial, found, AttentionResult(q, out, lse, grads[0]), k, v, ctx.visible)
        return *(grad.to(q.dtype) for grad in found), None, None
