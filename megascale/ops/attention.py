"""Causal attention on one device, to the whole past or to a sliding window of it (Beltagy et al. 2020; MegaScale 3.1).

With a window of w, query i sees the keys j with i - w < j <= i: w of them, its own included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.layout.windows import BLOCK, spans
from megascale.ops.select import Backend, Reluctance, Setting

Attend = Callable[[Tensor, Tensor, Tensor, int | None, Tensor | None, float], Tensor]
"""q [b, heads, s, d], k and v [b, kv heads, s, d], the window or None for the whole past, the weights that dropout
keeps or None, its probability; result as q.
"""


class TorchAttention(Backend):
    """torch's fused kernels, for a sliding window in blocks; with dropout the scores in full."""

    def build(self, setting: Setting) -> Attend:
        return causal_attention


def half_refusal(setting: Setting) -> str | None:
    """What speaks against kernels in 16 bits, which are for GPUs."""
    if setting.device.is_cpu:
        return "needs a GPU"
    return "needs a GPU of compute capability 8.0 or more" if setting.device.capability < (8, 0) else None


def reluctance(setting: Setting, newer: bool) -> Reluctance | None:
    """When a backend serves only if it is asked for. `newer`: whether its kernels are written for this GPU."""
    if any(setting.model.windows) or (newer and outdated(setting)):
        return None
    return Reluctance("no layer has a window, and without one torch's kernels serve as well")


def outdated(setting: Setting) -> bool:
    """Whether the kernel that torch takes for attention to the whole past was written for older GPUs than this."""
    m = setting.model
    kernel = setting.device.attention_kernel(setting.dtype, m.head_dim, m.num_kv_heads != m.num_heads)
    return surpassed(kernel, setting.device.capability)


def surpassed(kernel: str, capability: tuple[int, int]) -> bool:
    """Whether a kernel of torch's attention leaves about half of what a GPU can do to newer ones: on Hopper and on
    Blackwell in data centers all but cuDNN's, for torch's flash attention is its second version (Shah et al. 2024).
    """
    return capability[0] in (9, 10) and kernel != "CUDNN_ATTENTION"


def causal_attention(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, window: int | None, keep: Tensor | None, dropout: float
) -> Tensor:
    """softmax(q k^T / sqrt(d), masked) v for q [b, heads, s, d] and k, v [b, kv heads, s, d]; result as q.

    Without dropout this is torch's fused kernel. `keep` [b, heads, s, s], bool: the attention weights that dropout
    keeps; fused kernels draw their own mask, which depends on the layout, so with it the weights are formed in full.
    """
    s = q_bhsd.shape[2]
    if keep is None:
        if window is not None and window < s:
            return sliding_attention(q_bhsd, k_bhsd, v_bhsd, window)
        shared = k_bhsd.shape[1] != q_bhsd.shape[1]
        return F.scaled_dot_product_attention(q_bhsd, k_bhsd, v_bhsd, is_causal=True, enable_gqa=shared)
    groups = q_bhsd.shape[1] // k_bhsd.shape[1]
    k_bhsd, v_bhsd = (t.repeat_interleave(groups, 1) for t in (k_bhsd, v_bhsd))
    scores = (q_bhsd @ k_bhsd.mT) / math.sqrt(q_bhsd.shape[-1])
    places = torch.arange(s, device=scores.device)
    seen = visible(places, places, window or s)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return (weights * keep / (1 - dropout)) @ v_bhsd


def visible(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Which keys each query sees, bool [queries, keys], by their positions."""
    past = queries[:, None] - keys
    return (past >= 0) & (past < window)


def sliding_attention(q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, window: int, block: int = BLOCK) -> Tensor:
    """Attention to a sliding window, `block` queries at a time, which see at most window + block - 1 keys.

    Nothing larger than O(s (window + block)) is formed, forwards or backwards, whatever kernel torch takes.
    """
    s = q_bhsd.shape[2]
    block = min(block, s)
    keys = [seen for _, seen in spans(s, window, block)]
    reach = torch.arange(1 - window, block, device=q_bhsd.device)  # keys, counted from a block's first query
    seen = visible(reach[window - 1 :], reach, window)
    shared = k_bhsd.shape[1] != q_bhsd.shape[1]
    parts = []
    for q, k, v in zip(q_bhsd.split(block, 2), _Spans.apply(k_bhsd, keys), _Spans.apply(v_bhsd, keys), strict=True):
        rows, columns = q.shape[2], k.shape[2]
        last = window - 1 + rows
        mask = seen[:rows, last - columns : last]
        parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=shared))
    return torch.cat(parts, 2)


class _Spans(torch.autograd.Function):
    """Overlapping slices of [b, heads, s, d] along s. Written out because autograd would form, and add up, a gradient
    of the whole for each slice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, spans: list[slice]) -> tuple[Tensor, ...]:
        ctx.spans, ctx.shape = spans, x.shape
        return tuple(x[:, :, span] for span in spans)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=wide, device=grads[0].device)
        for span, grad in zip(ctx.spans, grads, strict=True):
            total[:, :, span] += grad
        return total.to(grads[0].dtype), None
