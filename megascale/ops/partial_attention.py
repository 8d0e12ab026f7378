"""Attention of some queries to some keys of a sequence, with the log-sum-exp of the scores, and the sum of such parts.

For the keys of a part p, with scores s = scale q k^T over the visible keys:

    lse_p = log sum exp s      out_p = sum exp(s - lse_p) v
    lse = log sum_p exp lse_p      out = sum_p exp(lse_p - lse) out_p                (`Accumulator`)

A sink, a learned logit of a head, is a part with its logit as lse_p and without values: out_p = 0.

Backward is a sum over the parts as well: with the lse and out of all keys, a part's P = exp(s - lse) and
dS = P (dO v^T - rowsum(dO out)) are those of the whole, and give its share of dq, and dk and dv of its keys (Dao et al.
2022; Liu et al. 2023). A part is a list of blocks (`layout.mask_blocks`); no tensor has the size of the scores.

`PartialAttention` is the interface, `TorchPartialAttention` its implementation with torch's flash kernel for CPUs.
"""

from __future__ import annotations

import math
from copy import copy
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megascale.layout.mask_blocks import MaskBlocks, Tile, tiles
from megascale.ops.select import OpContext

aten = torch.ops.aten


class AttentionResult(NamedTuple):
    """Queries [b, heads, n, d] after attention to all of their keys: the result and its gradient, as `q`, and the
    log-sum-exp of their scores [b, heads, n].
    """

    q: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor


class Gradients(NamedTuple):
    """The gradients of q [b, heads, n, d] and of k and v [b, kv heads, m, d]."""

    q: Tensor
    k: Tensor
    v: Tensor


class Accumulator:
    """The sum of parts of attention. `out` [b, heads, n, d] and `lse` [b, heads, n] are in fp32 or wider; an lse of
    minus infinity stands for a query that has seen no key.
    """

    def __init__(self, q_bhsd: Tensor) -> None:
        wide = torch.promote_types(q_bhsd.dtype, torch.float32)
        b, heads, n, d = q_bhsd.shape  # out has the memory order of the next linear layer's input
        self.out = torch.zeros(n, b, heads, d, dtype=wide, device=q_bhsd.device).permute(1, 2, 0, 3)
        self.lse = torch.full(q_bhsd.shape[:-1], -math.inf, dtype=wide, device=q_bhsd.device)

    def part(self, rows: slice, heads: slice) -> Accumulator:
        """The sum of some rows and heads, a view."""
        part = copy(self)
        part.out, part.lse = self.out[rows, heads], self.lse[rows, heads]
        return part

    def add(self, rows: slice, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Add a part for some rows and queries; every one of these queries sees a key."""
        total, before = self.out[rows, :, queries], self.lse[rows, :, queries]
        after = torch.logaddexp(before, lse)
        total.mul_((before - after).exp_().unsqueeze(-1)).add_(out * (lse - after).exp_().unsqueeze(-1))
        before.copy_(after)

    def add_at(self, rows: Tensor | slice, queries: Tensor | slice, out: Tensor, lse: Tensor) -> None:
        """Add a part, out [m, heads, d] and lse [heads, m], for the queries at m different places in the rows, or in
        slices of rows laid end to end.
        """
        lse = lse.t()
        if isinstance(rows, slice) and isinstance(queries, slice):
            out, lse = (t.unflatten(0, (rows.stop - rows.start, -1)).transpose(1, 2) for t in (out, lse))
            self.add(rows, queries, out, lse)
        else:
            total, before = self.out[rows, :, queries], self.lse[rows, :, queries]
            after = torch.logaddexp(before, lse)
            total.mul_((before - after).exp_().unsqueeze(-1)).add_(out * (lse - after).exp_().unsqueeze(-1))
            self.out[rows, :, queries], self.lse[rows, :, queries] = total, after

    def add_sinks(self, sinks: Tensor) -> None:
        """Add the logits `sinks` [heads], which have no value, to the sum over keys."""
        after = torch.logaddexp(self.lse, sinks.to(self.lse.dtype).view(-1, 1))
        self.out.mul_((self.lse - after).exp_().unsqueeze(-1))
        self.lse = after


def sinks_gradient(queries: AttentionResult, sinks: Tensor) -> Tensor:
    """Return the gradient of the logits `sinks` [heads]: of queries [b, heads, n, d] after attention to all keys and to
    the sinks, with P = exp(sink - lse), minus the sum of P rowsum(dO out).
    """
    out, grad = (t.to(queries.lse.dtype) for t in (queries.out, queries.grad_out))
    shares = (sinks.to(queries.lse.dtype).view(-1, 1) - queries.lse).exp_()
    return (shares * torch.linalg.vecdot(grad, out)).sum((0, 2)).neg_()


class TorchFlash:
    """torch's flash kernel for CPUs."""

    def unsupported_reason(self, context: OpContext) -> str | None:
        return None if context.device.is_cpu else "is for CPUs"

    def build(self, context: OpContext) -> PartialAttention:
        return TorchPartialAttention(context.model.attention_scale)


class PartialAttention(Protocol):
    """Attention over blocks of scores, by a backend, which applies the scale of the model's scores."""

    def add_forward(self, total: Accumulator, q: Tensor, k: Tensor, v: Tensor, blocks: MaskBlocks) -> None:
        """Add the attention of q [b, heads, n, d] to k and v [b, kv heads, m, d] within `blocks`."""

    def add_backward(
        self, grads: Gradients, queries: AttentionResult, k: Tensor, v: Tensor, blocks: MaskBlocks
    ) -> None:
        """Add the gradients of `add_forward` to `grads`, in fp32 or wider."""


class TorchPartialAttention:
    """torch's flash kernel for CPUs, which returns the log-sum-exp and has a backward of its own.

    Its only masks are the diagonal of a square and a tensor, so that a block is computed in tiles.
    """

    def __init__(self, scale: float | None = None) -> None:
        self._scale = scale

    def add_forward(self, total: Accumulator, q: Tensor, k: Tensor, v: Tensor, blocks: MaskBlocks) -> None:
        for block in blocks:
            rows = block.rows
            for tile in tiles(block):
                queries, keys = tile.queries, tile.keys
                out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                    q[rows, :, queries], k[rows, :, keys], v[rows, :, keys], 0.0, tile.diagonal,
                    attn_mask=_mask(tile, q), scale=self._scale,
                )  # fmt: skip
                total.add(rows, queries, out, lse)

    def add_backward(
        self, grads: Gradients, queries: AttentionResult, k: Tensor, v: Tensor, blocks: MaskBlocks
    ) -> None:
        for block in blocks:
            rows = block.rows
            for tile in tiles(block):
                of_queries, of_keys = (rows, slice(None), tile.queries), (rows, slice(None), tile.keys)
                q, out, lse, grad_out = (t[of_queries] for t in queries)
                found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad_out, q, k[of_keys], v[of_keys], out, lse, 0.0, tile.diagonal,
                    attn_mask=_mask(tile, q), scale=self._scale,
                )  # fmt: skip
                for total, place, grad in zip(grads, (of_queries, of_keys, of_keys), found, strict=True):
                    total[place].add_(grad)


def _mask(tile: Tile, q: Tensor) -> Tensor | None:
    """The additive mask of a tile [queries, keys]: minus infinity outside the band; None if a kernel needs none."""
    if tile.band is None:
        return None
    low, high = tile.band
    first, last = (torch.arange(part.start, part.stop, device=q.device) for part in (tile.queries, tile.keys))
    place = last - first[:, None]
    hidden = (place < low) | (place > high)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -math.inf)
