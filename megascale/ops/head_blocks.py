"""Attention within the blocks of scores that heads see (`layout.sparse_blocks`), by any `PartialAttention`.

Where only some of the heads or keys count, they are gathered before the kernels, and gradients scattered after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megascale.layout.sparse_blocks import HeadBlocks
from megascale.ops.partial_attention import Accumulator, AttentionResult, Gradients, PartialAttention


def add_forward(
    partial: PartialAttention, total: Accumulator, q: Tensor, k: Tensor, v: Tensor, visible: Sequence[HeadBlocks]
) -> None:
    """Add the attention of q [b, heads, n, d] to k and v [b, kv heads, m, d] within `visible`."""
    for seen in visible:
        at = seen.rows, seen.heads
        partial.add_forward(total.part(*at), q[at], _gather(seen, q, k), _gather(seen, q, v), seen.blocks)


def add_backward(
    partial: PartialAttention, grads: Gradients, queries: AttentionResult, k: Tensor, v: Tensor,
    visible: Sequence[HeadBlocks],
) -> None:  # fmt: skip
    """Add the gradients of `add_forward` to `grads`, in fp32 or wider."""
    for seen in visible:
        at, (keys, values) = (seen.rows, seen.heads), (_gather(seen, queries.q, t) for t in (k, v))
        found = grads[1:]
        if seen.keys is not None:
            found = torch.zeros_like(keys, dtype=grads.k.dtype), torch.zeros_like(values, dtype=grads.k.dtype)
        own = AttentionResult(*(t[at] for t in queries))
        partial.add_backward(Gradients(grads.q[at], *found), own, keys, values, seen.blocks)
        for total, part in zip(grads[1:], found, strict=True) if seen.keys is not None else ():
            heads, tokens = _seen_keys(seen, queries.q, total)
            for head, grad in zip(heads, part.unbind(1), strict=True):
                head.index_add_(1, tokens, grad)


def _gather(seen: HeadBlocks, q: Tensor, keys: Tensor) -> Tensor:
    """Return the keys or values [b, heads, m, d] that heads of q see: of all, or copies for some of the heads."""
    if seen.keys is None:
        return keys
    heads, tokens = _seen_keys(seen, q, keys)
    return torch.stack([head.index_select(1, tokens) for head in heads], 1)


def _seen_keys(seen: HeadBlocks, q: Tensor, keys: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return for each of some heads of q its keys [b, m, d], a view, and the tokens that it sees of them."""
    spans, shared = seen.keys or (), q.shape[1] // keys.shape[1]
    tokens = seen.blocks.derive(
        ("tokens", keys.device), lambda: torch.cat([torch.arange(s.start, s.stop, device=keys.device) for s in spans])
    )
    return [keys[seen.rows, head // shared] for head in range(q.shape[1])[seen.heads]], tokens


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
