"""Core attention on one device, causal, with an optional sliding window (Beltagy et al. 2020; MegaScale 3.1):

    softmax(scale q k^T + mask) v        with a window w, query i attends to the w keys j, i - w < j <= i

or with a sparse pattern, by head (`config.sparse_pattern`).

A soft cap c replaces the scores S = scale q k^T by c tanh(S / c) (Gemma 2).

`TorchAttention`, `causal_attention`, `sliding_attention`, `visible`: torch's implementation. The rest tells which
kernels suit a GPU: `half_precision_unsupported`, `not_by_default`, `torch_attention_outdated`, `is_outdated_kernel`,
`newer_flash`, `activate_newer_flash`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.config.sparse_pattern import Reach, SparsePattern
from megascale.layout.sequence_shard import Spans, TokenSpan
from megascale.layout.sparse_blocks import HeadBlocks, visible_blocks
from megascale.layout.windows import QUERY_BLOCK, window_blocks
from megascale.ops.boundaries import Boundaries
from megascale.ops.head_blocks import attend_within
from megascale.ops.library import FLASH3, FLASH4, Library
from megascale.ops.partial_attention import TorchPartialAttention
from megascale.ops.select import NotByDefault, OpBackend, OpContext


class AttentionMask(NamedTuple):
    """The mask of attention. `reach`: a window of keys up to a query's own, or a pattern by head, None for all keys;
    `boundaries`: of the documents that attention stays in, None for whole rows; `keep`, bool [b, heads, s, s]: the
    attention weights that survive dropout of probability `dropout`, None for all. `heads`: the numbers of the heads of
    q, over all ranks.
    """

    reach: Reach | None = None
    boundaries: Boundaries | None = None
    keep: Tensor | None = None
    dropout: float = 0.0
    heads: range = range(0)

    @property
    def window(self) -> int | None:
        """The window. Raises: TypeError for a pattern"""
        if isinstance(self.reach, SparsePattern):
            raise TypeError("a sparse pattern is no window")
        return self.reach

    def blocks(self, queries: Spans, keys: Spans, length: int) -> tuple[HeadBlocks, ...]:
        """List what heads see between queries and keys of rows of `length`, once for all layers."""
        if self.boundaries is None:
            return _visible_in_rows(queries, keys, self.reach, self.heads)
        key = ("blocks", queries, keys, self.reach, self.heads)
        return self.boundaries.shared(key, partial(visible_blocks, *key[1:], self.boundaries.starts, length))


_visible_in_rows = lru_cache(256)(visible_blocks)


CoreAttention = Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor]
"""Core attention by a backend, which applies the scale and the soft cap of the model's scores: from q [b, heads, s, d]
and k, v [b, kv heads, s, d] to a result as q.
"""


class TorchAttention(OpBackend):
    """torch's fused kernels, blockwise for a sliding window, on CPUs also for a sparse pattern; with dropout, unfused
    with all scores in memory.
    """

    def unsupported_reason(self, context: OpContext) -> str | None:
        sparse = context.model.sparse_attention is not None
        return "computes sparse attention on CPUs alone" if sparse and not context.device.is_cpu else None

    def build(self, context: OpContext) -> CoreAttention:
        activate_newer_flash(context)
        return torch_attend(context.model.attention_scale, context.model.attention_softcap)


def torch_attend(scale: float | None = None, softcap: float | None = None) -> CoreAttention:
    """Attention by torch's kernels, in rows or within documents."""

    def attend(q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: AttentionMask) -> Tensor:
        if isinstance(mask.reach, SparsePattern):  # blocks that no head sees are not computed
            whole = (TokenSpan(0, q_bhsd.shape[2]),)
            visible = mask.blocks(whole, whole, q_bhsd.shape[2])
            return attend_within(q_bhsd, k_bhsd, v_bhsd, visible, TorchPartialAttention(scale))
        factor = q_bhsd.shape[-1] ** -0.5 if scale is None else scale
        if mask.keep is not None:
            return _dropped_attention(q_bhsd, k_bhsd, v_bhsd, mask, mask.keep, factor, softcap)
        alone = partial(causal_attention, window=mask.window, scale=factor, softcap=softcap)
        if mask.boundaries is None:
            return alone(q_bhsd, k_bhsd, v_bhsd)
        return _document_attention(q_bhsd, k_bhsd, v_bhsd, mask.boundaries, alone)

    return attend


def _document_attention(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, boundaries: Boundaries, attend: Callable[..., Tensor]
) -> Tensor:
    """Attend document by document, so that scores between documents are not computed. A call of the kernel for each is
    faster on a CPU than one for several short documents with a mask, down to 16 tokens a document.
    """
    outputs = []
    for *row, lengths in zip(q_bhsd.split(1), k_bhsd.split(1), v_bhsd.split(1), boundaries.lengths, strict=True):
        parts = zip(*(t.split(list(lengths), 2) for t in row), strict=True)
        outputs.append(torch.cat([attend(*part) for part in parts], 2))
    return torch.cat(outputs)


def half_precision_unsupported(context: OpContext) -> str | None:
    """Say why 16-bit GPU kernels cannot run; None if they can."""
    if context.device.is_cpu:
        return "needs a GPU"
    return "needs a GPU of compute capability 8.0 or more" if context.device.capability < (8, 0) else None


def not_by_default(context: OpContext, newer: bool) -> NotByDefault | None:
    """Say why auto prefers torch's attention. `newer`: the backend has kernels written for this GPU generation."""
    model = context.model
    masked = any(model.windows) or model.attention_softcap or context.document_mask
    if masked or (newer and torch_attention_outdated(context)):
        return None
    return NotByDefault("no layer has a window, and torch's kernels are as fast without windows")


def torch_attention_outdated(context: OpContext) -> bool:
    """Return True if torch's kernel for full attention was written for an older GPU generation."""
    m = context.model
    kernel = context.device.attention_kernel(context.dtype, m.qk_head_dim, m.num_kv_heads != m.num_heads)
    if kernel == "FLASH_ATTENTION" and newer_flash(context) == "FA4":
        return False  # version 3 runs without torch's dispatcher, by the backend flash
    return is_outdated_kernel(kernel, context.device.capability)


def is_outdated_kernel(kernel: str, capability: tuple[int, int]) -> bool:
    """Return True if newer kernels are about twice as fast as torch's: on Hopper and data-center Blackwell, for all
    kernels but cuDNN's, since torch includes FlashAttention-2 (Shah et al. 2024).
    """
    return capability[0] in (9, 10) and kernel != "CUDNN_ATTENTION"


_NEWER_FLASH: dict[str, tuple[Library, Sequence[int], Sequence[int]]] = {
    "FA3": (FLASH3, (9,), range(8, 257, 8)),
    "FA4": (FLASH4, (9, 10), (64, 96, 128)),
}
"""Versions of FlashAttention that torch can run in place of its own, in `scaled_dot_product_attention` and in
`aten._flash_attention_forward`: the library, generations of GPUs, and head dims."""


def newer_flash(context: OpContext) -> str | None:
    """Name the installed FlashAttention that torch can run on this GPU in place of its own; None without one, and where
    kernels are to be deterministic: some releases of version 3 are not.
    """
    names: Sequence[str] = getattr(torch.nn.attention, "list_flash_attention_impls", list)()  # none before 2.13
    for name, (library, generations, head_dims) in _NEWER_FLASH.items():
        fits = context.device.capability[0] in generations and context.model.qk_head_dim in head_dims
        if name in names and fits and library.missing_reason() is None:
            return None if torch.are_deterministic_algorithms_enabled() else name
    return None


def activate_newer_flash(context: OpContext) -> None:
    """Let torch run `newer_flash`, if there is one, in this process."""
    if (newer := newer_flash(context)) is not None:
        torch.nn.attention.activate_flash_attention_impl(newer)


def causal_attention(
    q_bhsd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute causal attention by torch's fused kernel for q [b, heads, s, d] and k, v [b, kv heads, s, d]; result as
    q. `scale`: of the scores, by default 1 / sqrt(d). `softcap`: of the scaled scores.
    """
    s, scale = q_bhsd.shape[2], q_bhsd.shape[-1] ** -0.5 if scale is None else scale
    if softcap is not None:
        from megascale.ops.softcapped_attention import softcapped_attention

        return softcapped_attention(q_bhsd, k_bhsd, v_bhsd, window or s, scale, softcap)
    if window is not None and window < s:
        return sliding_attention(q_bhsd, k_bhsd, v_bhsd, window, scale=scale)
    shared = k_bhsd.shape[1] != q_bhsd.shape[1]
    return F.scaled_dot_product_attention(q_bhsd, k_bhsd, v_bhsd, is_causal=True, scale=scale, enable_gqa=shared)


def _dropped_attention(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: AttentionMask, keep: Tensor, scale: float,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """Attend with all weights in memory, and drop those not in `keep`: the dropout mask of a fused kernel would depend
    on the layout.
    """
    positions = torch.arange(q_bhsd.shape[2], device=q_bhsd.device)
    seen = visible(positions, positions, mask.window or len(positions))
    if mask.boundaries is not None:
        documents = mask.boundaries.documents
        seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    groups = q_bhsd.shape[1] // k_bhsd.shape[1]
    k_bhsd, v_bhsd = (t.repeat_interleave(groups, 1) for t in (k_bhsd, v_bhsd))
    scores = (q_bhsd @ k_bhsd.mT) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return (weights * keep / (1 - mask.dropout)) @ v_bhsd


def visible(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Return the causal window mask, bool [queries, keys], from positions of queries and keys."""
    past = queries[:, None] - keys
    return (past >= 0) & (past < window)


def sliding_attention(
    q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, window: int, block: int = QUERY_BLOCK, scale: float | None = None
) -> Tensor:
    """Compute sliding-window attention, `block` queries at a time against at most window + block - 1 keys.

    Memory is O(s (window + block)) in forward and backward, for every kernel of torch.
    """
    s = q_bhsd.shape[2]
    block = min(block, s)
    key_spans = [keys for _, keys in window_blocks(s, window, block)]
    offsets = torch.arange(1 - window, block, device=q_bhsd.device)  # of keys from a block's first query
    full_mask = visible(offsets[window - 1 :], offsets, window)
    shared = k_bhsd.shape[1] != q_bhsd.shape[1]
    outputs = []
    k_blocks, v_blocks = _Slices.apply(k_bhsd, key_spans), _Slices.apply(v_bhsd, key_spans)
    for q, k, v in zip(q_bhsd.split(block, 2), k_blocks, v_blocks, strict=True):
        rows, columns = q.shape[2], k.shape[2]
        last = window - 1 + rows
        mask = full_mask[:rows, last - columns : last]
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared))
    return torch.cat(outputs, 2)


class _Slices(torch.autograd.Function):
    """Overlapping slices of [b, heads, s, d] along s. Autograd itself would allocate a full gradient per slice."""

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
