"""Attention by flash-attn: FlashAttention-3 on Hopper if installed (Shah et al. 2024), otherwise FlashAttention-2
(Dao 2023). Both skip blocks of scores masked by a window, and compute documents of any lengths in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megascale.ops.core_attention import AttentionMask, CoreAttention, half_precision_unsupported, not_by_default
from megascale.ops.library import FLASH, FLASH3, Library
from megascale.ops.select import OpContext

SOFTCAP = replace(FLASH, versions=">=2.6,<3")  # releases of version 2 with a soft cap


class FlashAttention:
    """flash-attn; backward is deterministic only under `torch.use_deterministic_algorithms`."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        if reason := half_precision_unsupported(context):
            return reason
        library = _library(context)
        capped = library is FLASH and context.model.attention_softcap is not None
        missing = (SOFTCAP if capped else library).missing_reason()
        return missing or not_by_default(context, newer=library is FLASH3)

    def build(self, context: OpContext) -> CoreAttention:
        if _library(context) is FLASH:
            import flash_attn as library
        else:
            import flash_attn_interface as library
        model, varlen = context.model, library.flash_attn_varlen_func if context.document_mask else None
        return flash(library.flash_attn_func, model.attention_scale, model.attention_softcap, varlen)


def _library(context: OpContext) -> Library:
    """Select version 3 or 2. Version 3 runs on Hopper only, needs a head dim divisible by 8, and in some releases
    ignores `deterministic`.
    """
    if torch.are_deterministic_algorithms_enabled():
        return FLASH
    supported = context.device.capability[0] == 9 and context.model.qk_head_dim % 8 == 0
    return FLASH3 if supported and FLASH3.missing_reason() is None else FLASH


def flash(
    flash_attn_func: Callable[..., Any],
    scale: float | None = None,
    softcap: float | None = None,
    flash_attn_varlen_func: Callable[..., Any] | None = None,
) -> CoreAttention:
    """Wrap either version's `flash_attn_func`: q [b, s, heads, d], k and v [b, s, kv heads, d]; and for documents
    `flash_attn_varlen_func`, with the rows laid end to end: q [b s, heads, d], k and v [b s, kv heads, d].
    """

    capped = {} if softcap is None else {"softcap": softcap}  # an argument that version 2 has from 2.6 on

    def attend(q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: AttentionMask) -> Tensor:
        qkv = [t.transpose(1, 2) for t in (q_bhsd, k_bhsd, v_bhsd)]
        window, boundaries = mask.window, mask.boundaries
        options: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),  # keys left and right of a query's own
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        } | capped
        if boundaries is None:
            return _result(flash_attn_func(*qkv, **options)).transpose(1, 2)
        assert flash_attn_varlen_func is not None, "documents need the kernel for varying lengths"
        ends, longest = boundaries.cu_seqlens, boundaries.longest
        documents = {
            "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest,
        }  # fmt: skip
        out = _result(flash_attn_varlen_func(*(t.flatten(0, 1) for t in qkv), **documents, **options))
        return out.unflatten(0, qkv[0].shape[:2]).transpose(1, 2)

    return attend


def _result(out: Any) -> Tensor:
    """The attention output; early releases of version 3 return the log-sum-exp too."""
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result
