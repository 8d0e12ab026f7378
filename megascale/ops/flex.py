"""Sliding windows by FlexAttention (Dong et al. 2024), which torch.compile turns into one kernel that visits only the
blocks of scores with something to see.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megascale.ops import compiled
from megascale.ops.attention import Attend, causal_attention, reluctance
from megascale.ops.library import TRITON
from megascale.ops.select import Setting

BLOCK = 128
"""Queries, and keys, of a block of scores: FlexAttention's own choice."""


class FlexAttention:
    """FlexAttention for layers with a window; torch's kernels for those without."""

    def refusal(self, setting: Setting) -> str | None:
        if setting.device.is_cpu:
            return "has no backward on a CPU"
        return TRITON.absence() or reluctance(setting, newer=False)

    def build(self, setting: Setting) -> Attend:
        return flex(compiled.fused(flex_attention))


def flex(attention: Callable[..., Any]) -> Attend:
    """Attention by `flex_attention`, compiled or not."""

    def attend(
        q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, window: int | None, keep: Tensor | None, dropout: float
    ) -> Tensor:
        s = q_bhsd.shape[2]
        if window is None or window >= s:
            return causal_attention(q_bhsd, k_bhsd, v_bhsd, None, keep, dropout)
        mask = block_mask(s, window, q_bhsd.device)
        shared = k_bhsd.shape[1] != q_bhsd.shape[1]
        return attention(q_bhsd, k_bhsd, v_bhsd, block_mask=mask, enable_gqa=shared)

    return attend


@cache  # one for each window of the model; with train.compile what is compiled forms its own each time
def block_mask(s: int, window: int, device: torch.device) -> BlockMask:
    """Which blocks of an s x s matrix of scores a window shows in part, and which whole.

    Found from the corners of the blocks: `create_block_mask` would form all s x s entries.
    """

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - window)

    first = torch.arange(0, s, BLOCK, device=device)
    last = first + BLOCK - 1
    some = (first <= last[:, None]) & (last > first[:, None] - window)
    whole = (last <= first[:, None]) & (first > last[:, None] - window)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(s, s)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of bool [rows, columns] how many columns each row has, and which: these first, then the others."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return counts[None, None], order.int()[None, None]
