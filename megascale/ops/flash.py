"""Attention by flash-attn: on Hopper its third version if that is installed (Shah et al. 2024), else its second (Dao
2023). Both skip the blocks of scores that a window masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megascale.ops.attention import Attend, half_refusal, reluctance
from megascale.ops.library import FLASH, FLASH3, Library
from megascale.ops.select import Setting


class FlashAttention:
    """flash-attn. Its backward sums in any order unless torch is asked for deterministic algorithms."""

    def refusal(self, setting: Setting) -> str | None:
        if reason := half_refusal(setting):
            return reason
        library = _library(setting)
        return library.absence() or reluctance(setting, newer=library is FLASH3)

    def build(self, setting: Setting) -> Attend:
        if _library(setting) is FLASH:
            from flash_attn import flash_attn_func
        else:
            from flash_attn_interface import flash_attn_func
        return flash(flash_attn_func)


def _library(setting: Setting) -> Library:
    """The version to use: the third has kernels for Hopper, and none for what came later, nor, unlike the second, for
    heads that are no multiple of 8; and some of its releases sum in any order whatever they are asked for.
    """
    if torch.are_deterministic_algorithms_enabled():
        return FLASH
    serves = setting.device.capability[0] == 9 and setting.model.head_dim % 8 == 0
    return FLASH3 if serves and FLASH3.absence() is None else FLASH


def flash(flash_attn_func: Callable[..., Any]) -> Attend:
    """Attention by the function that both versions name so: q [b, s, heads, d], k and v [b, s, kv heads, d]."""

    def attend(
        q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, window: int | None, keep: Tensor | None, dropout: float
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q_bhsd, k_bhsd, v_bhsd))
        out = flash_attn_func(
            q,
            k,
            v,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),  # keys before a query's own, and after
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        if isinstance(out, tuple):  # early releases of the third version add the logarithms of the sums
            out = out[0]
        return out.transpose(1, 2)

    return attend
