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

from megascale.config.sparse_pattern import SparsePattern
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
        window = None if isinstance(reach, SparsePattern) else reach
        if isinstance(reach, SparsePattern):
            blocks = sparse_block_mask(reach, mask.heads(q_bhsd), s, q_bhsd.device, mask.boundaries)
        elif mask.boundaries is not None:
            blocks = document_block_mask(mask.boundaries, min(window or s, s))
        elif (window is None or window >= s) and softcap is None:
            return causal_attention(q_bhsd, k_bhsd, v_bhsd, None, mask.keep, mask.dropout, scale)
        else:
            blocks = block_mask(s, min(window or s, s), q_bhsd.device)
        shared = k_bhsd.shape[1] != q_bhsd.shape[1]
        return attention(q_bhsd, k_bhsd, v_bhsd, score_mod=score_mod, block_mask=blocks, scale=scale, enable_gqa=shared)

    return attend


@cache  # one per window; under train.compile the compiled graph builds its own mask
def block_mask(s: int, window: int, device: torch.device) -> BlockMask:
    """Classify blocks of the s x s scores as masked, partially visible or fully visible under a window.

    The corners of a block suffice; `create_block_mask` would evaluate all s x s elements.
    """

    def mask(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - window)

    first = torch.arange(0, s, BLOCK, device=device)
    last = first + BLOCK - 1
    visible = (first <= last[:, None]) & (last > first[:, None] - window)
    full = (last <= first[:, None]) & (first > last[:, None] - window)
    return BlockMask.from_kv_blocks(
        *_block_lists((visible & ~full)[None, None]),
        *_block_lists(full[None, None]),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask,
        seq_lengths=(s, s),
    )


def document_block_mask(boundaries: Boundaries, window: int) -> BlockMask:
    """Classify blocks of scores under a window within documents, for each row of the micro-batch. All layers with this
    window share the result.
    """
    documents, s = boundaries.documents, boundaries.length

    def mask(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - window) & (documents[b, key] == documents[b, query])

    def classify() -> BlockMask:
        first = torch.arange(0, s, BLOCK, device=documents.device)
        last = first + BLOCK - 1
        begins, ends = documents[:, first], documents[:, last.clamp(max=s - 1)]  # of blocks: documents ascend in a row
        visible = (first <= last[:, None]) & (last > first[:, None] - window) & (begins[:, :, None] <= ends[:, None])
        visible = visible & (ends[:, None] >= begins[:, :, None])
        full = (last <= first[:, None]) & (first > last[:, None] - window) & (begins[:, None] == ends[:, :, None])
        lists = *_block_lists((visible & ~full)[:, None]), *_block_lists(full[:, None])
        return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=(s, s))

    return boundaries.shared(("blocks", window), classify)


def sparse_block_mask(
    pattern: SparsePattern, heads: range, s: int, device: torch.device, boundaries: Boundaries | None
) -> BlockMask:
    """Classify blocks of scores by head under a sparse pattern, in rows or within documents. All layers share it."""
    if boundaries is None:
        return _sparse_mask_of_rows(pattern, heads, s, device)
    positions, documents = boundaries.positions.t().contiguous(), boundaries.documents
    key = ("sparse blocks", pattern, heads)
    return boundaries.shared(key, lambda: _sparse_mask(pattern, heads, positions, documents))


@cache
def _sparse_mask_of_rows(pattern: SparsePattern, heads: range, s: int, device: torch.device) -> BlockMask:
    positions = torch.arange(s, device=device)[None]
    return _sparse_mask(pattern, heads, positions, torch.zeros_like(positions))


def _sparse_mask(pattern: SparsePattern, heads: range, positions: Tensor, documents: Tensor) -> BlockMask:
    """Classify blocks from `positions` in documents and numbers of `documents` [b, s], equal rows for b = 1."""
    size, stride, local, s = pattern.block, pattern.stride, pattern.local_blocks, positions.shape[1]
    rows, first_head = len(positions), heads.start

    def mask(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = b % rows
        own, theirs = positions[row, query] // size, positions[row, key] // size
        seen = (own - theirs < local) | ((theirs + h + first_head) % stride == 0)
        return seen & (key <= query) & (documents[row, key] == documents[row, query])

    first = torch.arange(0, s, BLOCK, device=positions.device)
    last = (first + BLOCK - 1).clamp(max=s - 1)
    begins, ends = documents[:, first], documents[:, last]
    low, high = positions[:, first] // size, positions[:, last] // size  # pattern blocks, of those in one document
    shared = (begins[:, :, None] <= ends[:, None]) & (ends[:, :, None] >= begins[:, None])  # [b, queries, keys]
    alone = (begins[:, :, None] == ends[:, None]) & (ends[:, :, None] == begins[:, None])
    numbers = torch.arange(heads.start, heads.stop, device=positions.device)[:, None]
    turns = (high[:, None] + numbers) // stride - (low[:, None] + numbers - 1) // stride  # strided blocks [b, h, keys]
    some, only = turns[:, :, None] > 0, (turns[:, :, None] > 0) & (low == high)[:, None, None]
    near, all_near = low[:, :, None] - high[:, None] < local, high[:, :, None] - low[:, None] < local
    visible = ((first <= last[:, None]) & shared)[:, None] & (some | (near | ~alone)[:, None])
    full = ((last <= first[:, None]) & alone)[:, None] & (only | all_near[:, None])
    lists = *_block_lists(visible & ~full), *_block_lists(full & visible)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=(s, s))


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for bool [..., rows, columns] the count of True columns per row, and column indices with True columns
    first.
    """
    counts = blocks.sum(-1, dtype=torch.int32)
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return counts, order.int()
