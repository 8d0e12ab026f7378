"""Causal attention on one device."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_attention(q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, keep: Tensor | None, dropout: float) -> Tensor:
    """softmax(q k^T / sqrt(d), causal) v for q [b, heads, s, d] and k, v [b, kv heads, s, d]; result as q.

    Without dropout this is torch's fused kernel. `keep` [b, heads, s, s], bool: the attention weights that dropout
    keeps; fused kernels draw their own mask, which depends on the layout, so with it the weights are formed in full.
    """
    if keep is None:
        shared = k_bhsd.shape[1] != q_bhsd.shape[1]
        return F.scaled_dot_product_attention(q_bhsd, k_bhsd, v_bhsd, is_causal=True, enable_gqa=shared)
    groups = q_bhsd.shape[1] // k_bhsd.shape[1]
    k_bhsd, v_bhsd = (t.repeat_interleave(groups, 1) for t in (k_bhsd, v_bhsd))
    s = q_bhsd.shape[2]
    scores = (q_bhsd @ k_bhsd.mT) / math.sqrt(q_bhsd.shape[-1])
    future = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return (weights * keep / (1 - dropout)) @ v_bhsd
