"""Attention by Transformer Engine, which takes cuDNN's kernels or flash-attn's, whichever it finds quicker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megascale.ops.attention import Attend, half_refusal, reluctance
from megascale.ops.library import TE
from megascale.ops.select import Setting


class EngineAttention:
    """DotProductAttention, told of this rank's heads alone: it needs no groups of ranks."""

    def refusal(self, setting: Setting) -> str | None:
        if setting.model.head_dim % 8:  # without a word it would form all scores
            return "its kernels take heads of a multiple of 8"
        return half_refusal(setting) or TE.absence() or reluctance(setting, newer=True)

    def build(self, setting: Setting) -> Attend:
        from transformer_engine.pytorch import DotProductAttention

        model, tp = setting.model, setting.tp
        core = DotProductAttention(
            model.num_heads // tp,
            model.head_dim,
            num_gqa_groups=model.num_kv_heads // tp,
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="causal",
        )
        return engine(core)


def engine(core: Callable[..., Any]) -> Attend:
    """Attention by a DotProductAttention: q [s, b, heads, d], k and v [s, b, kv heads, d], result [s, b, heads x d]."""

    def attend(
        q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, window: int | None, keep: Tensor | None, dropout: float
    ) -> Tensor:
        b, heads, s, d = q_bhsd.shape
        q, k, v = (t.permute(2, 0, 1, 3) for t in (q_bhsd, k_bhsd, v_bhsd))
        before = -1 if window is None else window - 1  # keys before a query's own
        return core(q, k, v, window_size=(before, 0)).view(s, b, heads, d).permute(1, 2, 0, 3)

    return attend
