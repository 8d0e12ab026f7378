"""Attention to some of the keys by flash-attn, whose kernels take sequences of any lengths, return the log-sum-exp, and
go backward with one that is given: those of the library, version 3 on Hopper, or those that torch's GPU builds contain.

Blocks with the same windows are laid end to end and computed in one call, queries [n, heads, d] and keys [m, kv heads,
d]: the number of kernels does not grow with the documents of a row. What is one run of a row, as in a ring of whole
rows, is a view.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megascale.device import copy_to_device
from megascale.layout.mask_blocks import MaskBlock, MaskBlocks
from megascale.ops.core_attention import activate_newer_flash, half_precision_unsupported
from megascale.ops.library import FLASH, FLASH3, TRITON
from megascale.ops.partial_attention import Accumulator, AttentionResult, Gradients, PartialAttention
from megascale.ops.select import OpContext

aten = torch.ops.aten

LIBRARY = replace(FLASH, versions=">=2.7,<3")
"""Releases whose forward and backward take the two sides of a window apart."""


class FlashPartial:
    """flash-attn's forward and backward for sequences of any lengths: version 3's on Hopper if installed, else 2's."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        if context.model.qk_head_dim % 8:
            return "needs a head dim divisible by 8"
        if reason := half_precision_unsupported(context):
            return reason
        return None if _has_version_3(context) else LIBRARY.missing_reason()

    def build(self, context: OpContext) -> PartialAttention:
        m = context.model
        if _has_version_3(context):
            forward, backward = version_3(torch.ops.flash_attn_3)
        else:
            from flash_attn import flash_attn_interface as library

            forward, backward = library._flash_attn_varlen_forward, library._flash_attn_varlen_backward
        return FlashPartialAttention(forward, backward, m.attention_scale, _merge())


def _has_version_3(context: OpContext) -> bool:
    """Return True if flash-attn 3 serves: on Hopper, in releases that register operators of these names, and without
    deterministic algorithms, which some of them ignore.
    """
    if torch.are_deterministic_algorithms_enabled() or context.device.capability[0] != 9:
        return False
    return FLASH3.missing_reason() is None and hasattr(torch.ops.flash_attn_3, "_flash_attn_backward")


def version_3(operators: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return flash-attn 3's operators as functions with the arguments of version 2's; the rest has no effect."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, alibi_slopes: None, return_softmax: bool, **given: Any
    ) -> tuple[Tensor, Tensor]:
        return operators._flash_attn_forward(q, k, v, **given)[:2]

    def backward(*tensors: Tensor, dropout_p: float, alibi_slopes: None, causal: bool, **given: Any) -> None:
        *saved, dq, dk, dv = tensors
        operators._flash_attn_backward(*saved, dq=dq, dk=dk, dv=dv, is_causal=causal, **given)

    return forward, backward


class TorchVarlen:
    """flash-attn 2's kernels in torch's GPU builds (`torch.nn.attention.varlen`), or in their place version 3's or 4's
    if installed.
    """

    def unsupported_reason(self, context: OpContext) -> str | None:
        if context.model.qk_head_dim % 8:
            return "needs a head dim divisible by 8"
        if reason := half_precision_unsupported(context):
            return reason
        return None if find_spec("torch.nn.attention.varlen") else "needs torch 2.10 or later"

    def build(self, context: OpContext) -> PartialAttention:
        activate_newer_flash(context)
        m = context.model
        return FlashPartialAttention(_varlen_forward, _varlen_backward, m.attention_scale, _merge())


def _varlen_forward(  # noqa: PLR0913
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Call torch's forward with the arguments of flash-attn's; the rest has no effect."""
    return aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal, return_debug_mask=False,
        scale=softmax_scale, window_size_left=window_size_left, window_size_right=window_size_right,
    )[:2]  # fmt: skip


def _varlen_backward(  # noqa: PLR0913
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, **_: Any,
) -> None:  # fmt: skip
    """Call torch's backward with the arguments of flash-attn's. It follows
    `torch.are_deterministic_algorithms_enabled()` by itself.
    """
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    found = aten._flash_attention_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal,
        *no_dropout, scale=softmax_scale, window_size_left=window_size_left, window_size_right=window_size_right,
    )  # fmt: skip
    for into, grad in zip((dq, dk, dv), found, strict=True):
        into.copy_(grad)


Merge = Callable[[Accumulator, Tensor | slice, Tensor | slice, Tensor, Tensor], None]
"""Adds a part of attention, as `Accumulator.add_at`."""


def _merge() -> Merge:
    """Return the kernel that merges parts, or without Triton torch's operators."""
    if TRITON.missing_reason():
        return Accumulator.add_at
    from megascale.ops.merge_parts import merge_part

    return lambda total, *part: merge_part((total.out, total.lse), *part)


class _Tokens(NamedTuple):
    """Tokens of a micro-batch end to end: their rows and the places in them, each i64; or slices of both, where rows
    that follow each other have the same run of places.
    """

    rows: Tensor | slice
    places: Tensor | slice

    def of(self, x: Tensor) -> Tensor:
        """Return the tokens [m, heads, ...] of x [b, heads, n, ...], a view of a run in one row."""
        taken = x[self.rows, :, self.places]
        return taken.transpose(1, 2).flatten(0, 1) if isinstance(self.rows, slice) else taken

    def add(self, x: Tensor, part: Tensor) -> None:
        """Add a part [m, heads, d] to x [b, heads, n, d], where each token is once."""
        if isinstance(self.rows, slice):
            x[self.rows, :, self.places].transpose(1, 2).add_(part.unflatten(0, (self.rows.stop - self.rows.start, -1)))
        else:
            x[self.rows, :, self.places] += part


class _Call(NamedTuple):
    """The blocks of one call of a kernel: blocks with equal windows, of which no two have a query or a key in common.
    `lengths`, `windows`: arguments of the kernels.
    """

    queries: _Tokens
    keys: _Tokens
    lengths: dict[str, Any]
    windows: dict[str, Any]


@dataclass(frozen=True)
class FlashPartialAttention:
    """Attention with the `forward` and `backward` of flash-attn's `flash_attn_interface`."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    scale: float
    merge: Merge = Accumulator.add_at

    def add_forward(self, total: Accumulator, q: Tensor, k: Tensor, v: Tensor, blocks: MaskBlocks) -> None:
        for call in _calls(blocks, q.shape[0], q.device):
            parts = call.queries.of(q), call.keys.of(k), call.keys.of(v)
            out, lse = self.forward(
                *parts, **call.lengths, **call.windows, **self._options(), return_softmax=False
            )[:2]  # fmt: skip
            self.merge(total, *call.queries, out, lse)

    def add_backward(
        self, grads: Gradients, queries: AttentionResult, k: Tensor, v: Tensor, blocks: MaskBlocks
    ) -> None:
        for call in _calls(blocks, k.shape[0], k.device):
            q, out, lse, grad_out = map(call.queries.of, queries)
            parts = q, call.keys.of(k), call.keys.of(v)
            found = [torch.empty_like(t) for t in parts]
            self.backward(
                grad_out, *parts, out, lse.t().contiguous(), *found, **call.lengths, **call.windows, **self._options(),
                deterministic=torch.are_deterministic_algorithms_enabled(),
            )  # fmt: skip
            for tokens, into, part in zip((call.queries, call.keys, call.keys), grads, found, strict=True):
                tokens.add(into, part)

    def _options(self) -> dict[str, Any]:
        return {"dropout_p": 0.0, "softmax_scale": self.scale, "softcap": 0.0, "alibi_slopes": None}


def _calls(blocks: MaskBlocks, batch: int, device: torch.device) -> list[_Call]:
    """Divide blocks into calls of the kernel, of which there are few however many documents a row has."""
    key = ("flash-attn", batch, device)
    return blocks.derive(key, lambda: [_call(group, batch, device) for group in _groups(blocks, batch)])


def _groups(blocks: MaskBlocks, batch: int) -> Iterator[list[MaskBlock]]:
    """Yield groups of blocks with equal windows, of which no two have a query or a key in common."""
    sizes = (
        (max(block.queries.stop for block in blocks), max(block.keys.stop for block in blocks)) if blocks else (0, 0)
    )
    taken: dict[tuple[int | None, int | None], list[tuple[list[MaskBlock], np.ndarray, np.ndarray]]] = {}
    for block in blocks:
        groups = taken.setdefault((block.left, block.right), [])
        free = (g for g in groups if not (g[1][block.rows, block.queries].any() or g[2][block.rows, block.keys].any()))
        group = next(free, None)
        if group is None:
            group = [], np.zeros((batch, sizes[0]), bool), np.zeros((batch, sizes[1]), bool)
            groups.append(group)
        group[0].append(block)
        group[1][block.rows, block.queries] = group[2][block.rows, block.keys] = True
    yield from (group[0] for groups in taken.values() for group in groups)


def _call(group: Sequence[MaskBlock], batch: int, device: torch.device) -> _Call:
    """Lay the blocks of a group end to end, row by row of the micro-batch."""
    pieces = [(row, block) for block in group for row in (range(batch) if block.row is None else (block.row,))]
    rows = [row for row, _ in pieces]
    queries, q_lengths = _end_to_end("q", rows, [block.queries for _, block in pieces], device)
    keys, k_lengths = _end_to_end("k", rows, [block.keys for _, block in pieces], device)
    left, right = (-1 if side is None else side for side in (group[0].left, group[0].right))
    windows = {"causal": right == 0, "window_size_left": left, "window_size_right": right}
    # beside a left side, the kernels read a right one of -1 as `max_seqlen_k` keys: too few for more queries than keys
    k_lengths["max_seqlen_k"] = max(k_lengths["max_seqlen_k"], q_lengths["max_seqlen_q"])
    return _Call(queries, keys, q_lengths | k_lengths, windows)


def _end_to_end(
    name: str, rows: Sequence[int], spans: Sequence[slice], device: torch.device
) -> tuple[_Tokens, dict[str, Any]]:
    """Lay spans of rows end to end: the row and the place of every token, and the lengths as a kernel takes them."""
    sizes = [span.stop - span.start for span in spans]
    ends = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
    lengths = {f"cu_seqlens_{name}": copy_to_device(ends, device), f"max_seqlen_{name}": max(sizes)}
    in_turn = all(after.start == span.stop for span, after in itertools.pairwise(spans))
    if len(set(rows)) == 1 and in_turn:
        return _Tokens(slice(rows[0], rows[0] + 1), slice(spans[0].start, spans[-1].stop)), lengths
    if all(span == spans[0] for span in spans) and [*rows] == [*range(rows[0], rows[0] + len(rows))]:
        return _Tokens(slice(rows[0], rows[-1] + 1), spans[0]), lengths
    places = np.repeat(rows, sizes), np.concatenate([np.arange(span.start, span.stop) for span in spans])
    return _Tokens(*(copy_to_device(numbers, device) for numbers in places)), lengths
