"""Attention by Transformer Engine, with its choice of cuDNN or flash-attn kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megascale.ops.core_attention import AttentionMask, CoreAttention, half_precision_unsupported, not_by_default
from megascale.ops.library import TE
from megascale.ops.select import OpContext


class TEAttention:
    """DotProductAttention over this rank's heads, without a tensor-parallel group."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        if context.model.qk_head_dim % 8:  # otherwise TE silently computes all scores in memory
            return "needs a head dim divisible by 8"
        return half_precision_unsupported(context) or TE.missing_reason() or not_by_default(context, newer=True)

    def build(self, context: OpContext) -> CoreAttention:
        from transformer_engine.pytorch import DotProductAttention

        model, tp = context.model, context.tp
        core = DotProductAttention(
            model.num_heads // tp,
            model.qk_head_dim,
            num_gqa_groups=model.num_kv_heads // tp,
            softmax_scale=model.attention_scale,
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="causal",
        )
        return te_attend(core)


def te_attend(core: Callable[..., Any]) -> CoreAttention:
    """Wrap DotProductAttention: q [s, b, heads, d], k and v [s, b, kv heads, d], result [s, b, heads x d]. With
    documents, of rows laid end to end: q [b s, heads, d], k and v [b s, kv heads, d], result [b s, heads x d].
    """

    def attend(q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: AttentionMask) -> Tensor:
        b, heads, s, d = q_bhsd.shape
        window, boundaries = mask.window, mask.boundaries
        left = -1 if window is None else window - 1  # keys to the left of a query's own
        if boundaries is None:
            q, k, v = (t.permute(2, 0, 1, 3) for t in (q_bhsd, k_bhsd, v_bhsd))
            return core(q, k, v, window_size=(left, 0)).view(s, b, heads, d).permute(1, 2, 0, 3)
        ends, longest = boundaries.cu_seqlens, boundaries.longest
        out = core(
            *(t.transpose(1, 2).flatten(0, 1) for t in (q_bhsd, k_bhsd, v_bhsd)),
            qkv_format="thd",
            attn_mask_type="padding_causal",  # causal within each sequence
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            window_size=(left, 0),
        )
        return out.view(b, s, heads, d).transpose(1, 2)

    return attend
