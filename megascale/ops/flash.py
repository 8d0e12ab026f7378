"""Attention by flash-attn: FlashAttention-3 on Hopper if installed (Shah et al. 2024), otherwise FlashAttention-2
(Dao 2023). Both skip blocks of scores masked by a window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megascale.ops.core_attention import Attend, half_precision_unsupported, not_by_default
from megascale.ops.library import FLASH, FLASH3, Library
from megascale.ops.select import OpContext

SOFTCAP = replace(FLASH, versions=">=2.6,<3")
"""Releases of version 2 with a soft cap."""


class FlashAttention:
    """flash-attn; backward is deterministic only under `torch.use_deterministic_algorithms`."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        if reason := half_precision_unsupported(context):
            return reason
        library = _library(context)
        capped = library is FLASH and context.model.attention_softcap is not None
        missing = (SOFTCAP if capped else library).missing_reason()
        return missing or not_by_default(context, newer=library is FLASH3)

    def build(self, context: OpContext) -> Attend:
        if _library(context) is FLASH:
            from flash_attn import flash_attn_func
        else:
            from flash_attn_interface import flash_attn_func
        return flash(flash_attn_func, context.model.attention_scale, context.model.attention_softcap)


def _library(context: OpContext) -> Library:
    """Select version 3 or 2. Version 3 runs on Hopper only, needs a head dim divisible by 8, and in some releases
    ignores `deterministic`.
    """
    if torch.are_deterministic_algorithms_enabled():
        return FLASH
    supported = context.device.capability[0] == 9 and context.model.head_dim % 8 == 0
    return FLASH3 if supported and FLASH3.missing_reason() is None else FLASH


def flash(flash_attn_func: Callable[..., Any], scale: float | None = None, softcap: float | None = None) -> Attend:
    """Wrap either version's `flash_attn_func`: q [b, s, heads, d], k and v [b, s, kv heads, d]."""

    capped = {} if softcap is None else {"softcap": softcap}  # an argument that version 2 has from 2.6 on

    def attend(
        q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, window: int | None, keep: Tensor | None, dropout: float
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q_bhsd, k_bhsd, v_bhsd))
        out = flash_attn_func(
            q,
            k,
            v,
            softmax_scale=scale,
            causal=True,
            **capped,
            window_size=(-1, -1) if window is None else (window - 1, 0),  # keys to the left and right of a query's own
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        if isinstance(out, tuple):  # early releases of version 3 return the log-sum-exp too
            out = out[0]
        return out.transpose(1, 2)

    return attend
