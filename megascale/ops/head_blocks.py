"""Attention within the blocks of scores that heads see (`layout.sparse_blocks`), by any `PartialAttention`.

Where heads that see the same blocks are not evenly spread over key-value heads, their keys are gathered before the
kernels, and gradients scattered after them.
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
    for blocks, heads in visible:
        of = _key_heads(heads, q, k)
        partial.add_forward(total.part(heads), q[:, heads], k[:, of], v[:, of], blocks)


def add_backward(
    partial: PartialAttention, grads: Gradients, queries: AttentionResult, k: Tensor, v: Tensor,
    visible: Sequence[HeadBlocks],
) -> None:  # fmt: skip
    """Add the gradients of `add_forward` to `grads`, in fp32 or wider."""
    for blocks, heads in visible:
        of = _key_heads(heads, queries.q, k)
        own, keys, values = AttentionResult(*(t[:, heads] for t in queries)), k[:, of], v[:, of]
        found = [grad[:, of] if isinstance(of, slice) else torch.zeros_like(grad[:, of]) for grad in grads[1:]]
        partial.add_backward(Gradients(grads.q[:, heads], *found), own, keys, values, blocks)
        if not isinstance(of, slice):
            for total, part in zip(grads[1:], found, strict=True):
                total.index_add_(1, of, part)


def _key_heads(heads: slice, q: Tensor, k: Tensor) -> slice | Tensor:
    """Return the heads of k [b, kv heads, m, d] for some heads of q [b, heads, n, d], in groups or one for each."""
    shared, step = q.shape[1] // k.shape[1], heads.step or 1
    if shared % step == 0:
        return slice(None)
    if step % shared == 0:
        return slice(heads.start // shared, None, step // shared)
    return torch.arange(q.shape[1], device=q.device)[heads] // shared


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
