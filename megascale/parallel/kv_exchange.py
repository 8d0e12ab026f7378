"""Attention to the keys and values of other ranks: as they travel from neighbour to neighbour, or all at once.

    forward     own [2, b, kv heads, n, d], keys and values of this rank's tokens, visit every rank
    backward    they visit every rank again, and return with the gradient that each of the ranks has added

`RingKV`, `AllGatherKV`: the two ways, as a `KVExchange`. `attend_to_all`: the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from megascale.comm.collectives import all_gather, reduce_scatter, send_on
from megascale.comm.group import Group
from megascale.comm.work import COMPLETED, Work
from megascale.layout.sequence_shard import SequenceShard, TokenSpan, count, whole_sequence
from megascale.layout.sparse_blocks import HeadBlocks
from megascale.ops.core_attention import AttentionMask
from megascale.ops.head_blocks import add_backward, add_forward
from megascale.ops.partial_attention import Accumulator, AttentionResult, Gradients, PartialAttention, sinks_gradient
from megascale.parallel.grad_accumulation import accumulate_grad
from megascale.record.label import Label


@dataclass(frozen=True)
class VisibleScores:
    """The scores between the queries of a shard, of those of every rank that exchanges keys, and keys."""

    shard: SequenceShard
    mask: AttentionMask

    def to_rank(self, rank: int) -> tuple[HeadBlocks, ...]:
        """The blocks of scores with the keys of a rank."""
        return self.mask.blocks(self.shard.spans, self.shard.parts[rank], self.shard.length)

    def to_all(self) -> tuple[HeadBlocks, ...]:
        """The blocks of scores with all keys, in the order of the sequence."""
        return self.mask.blocks(self.shard.spans, (TokenSpan(0, self.shard.length),), self.shard.length)


AttendForward = Callable[[Tensor, Sequence[HeadBlocks]], None]
"""Attends to keys and values [2, b, kv heads, m, d] within blocks."""

AttendBackward = Callable[[Tensor, Sequence[HeadBlocks], Tensor], None]
"""As in forward; adds to their gradient [2, b, kv heads, m, d], in fp32 or wider."""


class KVExchange(Protocol):
    """The way in which ranks see each other's keys and values. `own` [2, b, kv heads, n, d]: of this rank."""

    def forward(self, own: Tensor, attend: AttendForward) -> None:
        """Attend to the keys and values of every rank."""

    def backward(self, own: Tensor, attend: AttendBackward) -> Tensor:
        """Return the gradient of `own`, in fp32 or wider."""


class RingKV(KVExchange):
    """Keys and values travel from neighbour to neighbour, under the attention to those that came before.

    In backward a gradient travels with them, and takes up what every rank adds: under the next rank's attention. The
    ring is the ranks of the group that have a part; one rank sends nothing, and needs no group. Without `overlap` each
    message is waited for where it is sent.
    """

    def __init__(self, group: Group | None, visible: VisibleScores, layer: int, overlap: bool = True) -> None:
        self._group = group
        self._visible = visible
        self._shard = shard = visible.shard
        self._size = len(shard.parts)
        self._to, self._source = (shard.first + (shard.index + step) % self._size for step in (1, -1))
        self._label = Label.for_layer(layer, "keys")
        self._overlap = overlap

    def forward(self, own: Tensor, attend: AttendForward) -> None:
        for owner, block in self._travel(own, self._label):
            attend(block, self._visible.to_rank(owner))

    def backward(self, own: Tensor, attend: AttendBackward) -> Tensor:
        label, wide = self._label.for_backward("gradient"), torch.promote_types(own.dtype, torch.float32)
        arriving: Work = COMPLETED
        before: Tensor | None = None
        for owner, block in self._travel(own, self._label.for_backward("again")):
            grad = torch.zeros(block.shape, dtype=wide, device=own.device)
            attend(block, self._visible.to_rank(owner), grad)
            if self._size == 1:
                return grad
            arriving.wait()
            if before is not None:
                grad += before
            before = self._like(grad, owner - 1)
            arriving = self._send_on(grad, before, label)
        arriving.wait()
        assert before is not None, "a ring has ranks"
        return before

    def _travel(self, own: Tensor, label: Label) -> Iterator[tuple[int, Tensor]]:
        """Yield (owner, keys and values) of every rank, this rank first. The next arrive while the caller computes."""
        block = own
        for step in range(self._size):
            owner, following = (self._shard.index - step) % self._size, block
            arriving: Work = COMPLETED
            if step + 1 < self._size:
                following = self._like(block, owner - 1)
                arriving = self._send_on(block, following, label)
            yield owner, block
            arriving.wait()
            block = following

    def _like(self, block: Tensor, owner: int) -> Tensor:
        """Allocate what arrives of an owner, which may have another number of tokens."""
        return block.new_empty(*block.shape[:-2], count(self._shard.parts[owner % self._size]), block.shape[-1])

    def _send_on(self, out: Tensor, into: Tensor, label: Label) -> Work:
        assert self._group is not None, "ranks of a ring have a group"
        work = send_on(self._group, out, into, self._to, self._source, label=label)
        if self._overlap:
            return work
        work.wait()
        return COMPLETED


def whole_keys(length: int, mask: AttentionMask, layer: int) -> RingKV:
    """Return the exchange of a rank that has all keys of a sequence of `length`."""
    return RingKV(None, VisibleScores(whole_sequence(length), mask), layer)


class AllGatherKV(KVExchange):
    """Keys and values of all ranks come at once, in forward and again in backward; gradients are reduce-scattered."""

    def __init__(self, group: Group, visible: VisibleScores, layer: int) -> None:
        self._group = group
        self._visible = visible
        self._label = Label.for_layer(layer, "keys")
        self._places = [
            (rank, slice(end - span.size, end), slice(*span))  # where a rank has a span, and where the sequence has it
            for rank, part in enumerate(visible.shard.parts)
            for span, end in zip(part, accumulate(span.size for span in part), strict=True)
        ]

    def forward(self, own: Tensor, attend: AttendForward) -> None:
        attend(self._gather(own, self._label), self._visible.to_all())

    def backward(self, own: Tensor, attend: AttendBackward) -> Tensor:
        block = self._gather(own, self._label.for_backward("again"))
        grad = torch.zeros(block.shape, dtype=torch.promote_types(own.dtype, torch.float32), device=own.device)
        attend(block, self._visible.to_all(), grad)
        full = grad.new_empty(self._group.size, *own.shape)
        for rank, place, positions in self._places:
            full[rank, ..., place, :] = grad[..., positions, :]
        out = grad.new_empty(own.shape)
        reduce_scatter(self._group, out, full.flatten(0, 1), label=self._label.for_backward("gradient"))
        return out

    def _gather(self, own: Tensor, label: Label) -> Tensor:
        """Return keys and values of all ranks, in the order of the sequence."""
        full = own.new_empty(self._group.size, *own.shape)
        all_gather(self._group, full.flatten(0, 1), own, label=label)
        ordered = own.new_empty(*own.shape[:-2], self._visible.shard.length, own.shape[-1])
        for rank, place, positions in self._places:
            ordered[..., positions, :] = full[rank, ..., place, :]
        return ordered


def attend_to_all(
    q: Tensor, k: Tensor, v: Tensor, exchange: KVExchange, partial: PartialAttention, sinks: Tensor | None = None,
    first: int = 0,
) -> Tensor:  # fmt: skip
    """Attend with this rank's q [b, heads, n, d] to the keys and values of all ranks; k and v [b, kv heads, n, d] are
    this rank's. `sinks`: learned logits of a tensor-parallel rank's heads; `first`: the place of the first head of q
    among them. The result is as q.
    """
    return _AttentionInParts.apply(q, k, v, exchange, partial, sinks, first)


class _AttentionInParts(torch.autograd.Function):
    """Attention of this rank's queries, in parts of the keys. Forward saves q, own keys and values, the result and a
    log-sum-exp for each query.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, exchange: KVExchange, partial: PartialAttention,
        sinks: Tensor | None, first: int,
    ) -> Tensor:  # fmt: skip
        own, total = torch.stack((k, v)), Accumulator(q)
        exchange.forward(own, lambda block, blocks: add_forward(partial, total, q, block[0], block[1], blocks))
        if sinks is not None:
            total.add_sinks(sinks[first : first + q.shape[1]])
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, own, out, total.lse)
        ctx.sinks = sinks  # themselves: saved ones that hooks restore have no main gradient
        ctx.exchange, ctx.partial, ctx.first = exchange, partial, first
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, own, out, lse), sinks = ctx.saved_tensors, ctx.sinks
        queries, grad_sinks = AttentionResult(q, out, lse, grads[0]), None
        if sinks is not None:
            heads, total = slice(ctx.first, ctx.first + q.shape[1]), lse.new_zeros(len(sinks))
            total[heads] = sinks_gradient(queries, sinks[heads])
            grad_sinks = accumulate_grad(sinks, total)
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)

        def attend(block: Tensor, blocks: Sequence[HeadBlocks], grad: Tensor) -> None:
            add_backward(ctx.partial, Gradients(grad_q, *grad), queries, block[0], block[1], blocks)

        grad_k, grad_v = ctx.exchange.backward(own, attend).to(own.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, grad_sinks, None
