"""Causal attention with soft-capped scores, as in Gemma 2, for torch's operators: its fused kernels have no soft cap.

    P = softmax(c tanh(S / c) + mask)      S = scale q k^T      out = P v

Computed in blocks of queries, with all scores in fp32 or wider; forward saves q, k, v, out and a log-sum-exp per query,
and backward forms the scores again (Dao et al. 2022):

    dV = P^T dO      dS = P (dO v^T - rowsum(dO out)) (1 - tanh^2(S / c))      dq = scale dS k      dk = scale dS^T q
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megascale.layout.windows import QUERY_BLOCK, window_blocks


def softcapped_attention(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, window: int, scale: float, softcap: float, block: int = QUERY_BLOCK
) -> Tensor:
    """Attend within `window` keys, for q [b, heads, s, d] and k, v [b, kv heads, s, d]; result as q.

    Memory is O(s + block x window) in forward and backward.
    """
    return _SoftcappedAttention.apply(q_bhsd, k_bhsd, v_bhsd, window, scale, softcap, block)


class _SoftcappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, softcap: float, block: int
    ) -> Tensor:
        b, heads, s, d = q.shape
        ctx.window, ctx.scale, ctx.softcap, ctx.block = window, scale, softcap, block
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty(s, b, heads, d).permute(1, 2, 0, 3)  # the memory order of the next linear layer's input
        lse = q.new_empty(b, k.shape[1], heads // k.shape[1], s, dtype=wide)
        for queries, keys in window_blocks(s, window, block):
            rows = _grouped(q[:, :, queries], k.shape[1], wide)
            scores, hidden = _tanh_scores(rows, k[:, :, keys].to(wide), queries, keys, ctx)
            scores = scores.mul_(softcap).masked_fill_(hidden, -math.inf)
            lse[..., queries] = torch.logsumexp(scores, -1)
            weights = scores.sub_(lse[..., queries].unsqueeze(-1)).exp_()
            result = _matmul(weights, v[:, :, keys].to(wide))
            out[:, :, queries] = result.flatten(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        kv_heads, wide = k.shape[1], lse.dtype
        grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        grad_k, grad_v = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (k, v))
        for queries, keys in window_blocks(q.shape[2], ctx.window, ctx.block):
            rows, grad, result = (_grouped(t[:, :, queries], kv_heads, wide) for t in (q, grads[0], out))
            k_block, v_block = k[:, :, keys].to(wide), v[:, :, keys].to(wide)
            tanh, hidden = _tanh_scores(rows, k_block, queries, keys, ctx)
            weights = (tanh * ctx.softcap).sub_(lse[..., queries].unsqueeze(-1)).exp_().masked_fill_(hidden, 0.0)
            grad_v[:, :, keys] += _over_queries(weights, grad)
            grad_scores = _matmul(grad, v_block.mT).sub_((grad * result).sum(-1, keepdim=True)).mul_(weights)
            grad_scores.mul_(tanh.square_().neg_().add_(1.0)).mul_(ctx.scale)
            grad_q[:, :, queries] = _matmul(grad_scores, k_block).flatten(1, 2).to(q.dtype)
            grad_k[:, :, keys] += _over_queries(grad_scores, rows)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None


def _tanh_scores(rows: Tensor, k: Tensor, queries: slice, keys: slice, ctx: Any) -> tuple[Tensor, Tensor]:
    """Return tanh(scores / softcap) [b, kv heads, groups, queries, keys], and the mask of hidden keys."""
    tanh = _matmul(rows, k.mT).mul_(ctx.scale / ctx.softcap).tanh_()
    past = torch.arange(queries.start, queries.stop, device=k.device)[:, None]
    past = past - torch.arange(keys.start, keys.stop, device=k.device)
    return tanh, (past < 0) | (past >= ctx.window)


def _grouped(t: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """View heads [b, heads, s, d] by their key-value head: [b, kv heads, groups, s, d]."""
    return t.unflatten(1, (kv_heads, -1)).to(dtype)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply [b, kv heads, groups, m, k] by [b, kv heads, k, n], the same for all groups."""
    return (a.flatten(2, 3) @ b).unflatten(2, a.shape[2:4])


def _over_queries(a: Tensor, b: Tensor) -> Tensor:
    """Sum a^T b over groups and queries: [b, kv heads, m, n] from [b, kv heads, groups, queries, m] and [..., n]."""
    return a.flatten(2, 3).mT @ b.flatten(2, 3)
