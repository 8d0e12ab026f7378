"""Attention in sliding windows, in sparse patterns, with a soft cap, or within documents by FlexAttention (Dong et al.
2024). torch.compile generates a single kernel over the blocks of scores with unmasked elements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megascale.config.sparse_pattern import Reach, SparsePattern
from megascale.ops import compiled
from megascale.ops.boundaries import Boundaries
from megascale.ops.core_attention import AttentionMask, CoreAttention, causal_attention, not_by_default
from megascale.ops.library import TRITON
from megascale.ops.select import OpContext

BLOCK = 128  # side of a block of scores, in queries and keys: FlexAttention's default


class FlexAttention:
    """FlexAttention for layers with a window, a pattern, a soft cap or documents, torch's kernels for all attention."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        if context.device.is_cpu:
            return "has no backward on a CPU"
        return TRITON.missing_reason() or not_by_default(context, newer=False)

    def build(self, context: OpContext) -> CoreAttention:
        model = context.model
        return flex(compiled.compile_function(flex_attention), model.attention_scale, model.attention_softcap)


def flex(attention: Callable[..., Any], scale: float | None = None, softcap: float | None = None) -> CoreAttention:
    """Wrap `flex_attention`, compiled or not. With a soft cap or documents it also computes full attention."""

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    score_mod = None if softcap is None else capped

    def attend(q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: AttentionMask) -> Tensor:
        s, reach = q_bhsd.shape[2], mask.reach
        sees_all = reach is None or (isinstance(reach, int) and reach >= s)
        if sees_all and mask.boundaries is None and softcap is None:
            return causal_attention(q_bhsd, k_bhsd, v_bhsd, None, scale)
        blocks = block_mask(reach, mask.heads, s, q_bhsd.device, mask.boundaries)
        shared = k_bhsd.shape[1] != q_bhsd.shape[1]
        return attention(q_bhsd, k_bhsd, v_bhsd, score_mod=score_mod, block_mask=blocks, scale=scale, enable_gqa=shared)

    return attend


def block_mask(
    reach: Reach | None, heads: range, s: int, device: torch.device, boundaries: Boundaries | None
) -> BlockMask:
    """Classify blocks of the s x s scores as masked, partly or fully visible: under a window, or by head under a sparse
    pattern, in rows or within documents. All layers share the result.
    """
    if not isinstance(reach, SparsePattern):
        reach, heads = min(reach or s, s), range(1)  # of all heads
    if boundaries is None:
        return _block_mask_of_rows(reach, heads, s, device)
    return boundaries.shared(("block mask", reach, heads), lambda: _block_mask(reach, heads, s, device, boundaries))


MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Tells whether a query of a row and a head sees a key."""


def _block_mask(
    reach: Reach, heads: range, s: int, device: torch.device, boundaries: Boundaries | None = None
) -> BlockMask:
    """The corners of a block suffice; `create_block_mask` would evaluate all s x s elements."""
    positions = torch.arange(s, device=device)[None]
    documents = torch.zeros_like(positions)
    if boundaries is not None:
        positions, documents = boundaries.positions.t().contiguous(), boundaries.documents
    first = torch.arange(0, s, BLOCK, device=device)
    last = (first + BLOCK - 1).clamp(max=s - 1)
    begins, ends = documents[:, None, first], documents[:, None, last]  # of blocks: documents ascend in a row
    shared = (begins[..., None] <= ends[..., None, :]) & (ends[..., None] >= begins[..., None, :])  # [b, 1, q, k]
    alone = (begins[..., None] == ends[..., None, :]) & (ends[..., None] == begins[..., None, :])
    if isinstance(reach, SparsePattern):
        some, every, sees = _sparse(reach, heads, positions, first, last, alone)
    else:
        some, every = last > first[:, None] - reach, first > last[:, None] - reach
        sees = lambda b, h, query, key: key > query - reach  # noqa: E731
    visible = (first <= last[:, None]) & shared & some
    full = (last <= first[:, None]) & alone & every & visible

    def mask(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = sees(b, h, query, key) & (key <= query)
        return seen if boundaries is None else seen & (documents[b, key] == documents[b, query])

    lists = *_block_lists(visible & ~full), *_block_lists(full)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=(s, s))


_block_mask_of_rows = cache(_block_mask)  # under train.compile the compiled graph builds its own mask


def _sparse(
    pattern: SparsePattern, heads: range, positions: Tensor, first: Tensor, last: Tensor, alone: Tensor
) -> tuple[Tensor, Tensor, MaskMod]:
    """Return in which blocks, from their `first` to their `last` token, a query sees a key, in which every query sees
    every key [b, heads, queries, keys], and the mask. `positions` [b, s]: in documents; `alone`: of blocks in one
    document, as others may have any blocks of the pattern.
    """
    size, stride, local, rows = pattern.block, pattern.stride, pattern.local_blocks, len(positions)

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own, theirs = (positions[b % rows, token] // size for token in (query, key))
        return (own - theirs < local) | ((theirs + h + heads.start) % stride == 0)

    low, high = positions[:, None, first] // size, positions[:, None, last] // size  # of a block in one document
    numbers = torch.arange(heads.start, heads.stop, device=positions.device)[:, None]
    strided = (high + numbers) // stride > (low + numbers - 1) // stride  # in keys' blocks [b, heads, keys]
    near, all_near = low[..., None] - high[..., None, :] < local, high[..., None] - low[..., None, :] < local
    some = strided[:, :, None] | near | ~alone
    return some, (strided & (low == high))[:, :, None] | all_near, sees


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for bool [..., rows, columns] the count of True columns per row, and column indices with True columns
    first.
    """
    counts = blocks.sum(-1, dtype=torch.int32)
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return counts, order.int()
