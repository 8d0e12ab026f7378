"""Context parallelism: attention of a sequence whose tokens are split over ranks (`layout.sequence_shard`).

cp = heads x keys ranks. What they exchange in a forward, for q, k and v of n and m heads of d elements of s / cp tokens
a rank, in bytes of B per element that a rank sends:

    heads   all-to-all: every rank gets all tokens of fewer heads, and attends as one rank would (DeepSpeed-Ulysses,
            Jacobs et al. 2023); then back           (2 n + 2 m) d B s / cp x (heads - 1) / heads
    keys    every rank sees the keys and values of all ranks, in turn from neighbour to neighbour (Ring Attention, Liu
            et al. 2023), or all at once             2 m d B s / cp x (keys - 1)

Both at once: heads among neighbours, and keys across (USP, Fang and Zhao 2024). With more ranks than key-value heads,
these are repeated before the all-to-all. In backward the all-to-alls are repeated in reverse, keys and values travel
again, and their gradients with them in fp32 or wider, to end at the ranks that own them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megascale.comm.collectives import all_to_all
from megascale.comm.group import Group
from megascale.layout.sequence_shard import SequenceShard
from megascale.ops.core_attention import AttentionMask, CoreAttention
from megascale.ops.partial_attention import PartialAttention
from megascale.parallel.kv_exchange import AllGatherKV, RingKV, VisibleScores, attend_to_all
from megascale.record.label import Label


@dataclass(frozen=True)
class ContextParallel:
    """The attention of a context-parallel rank. `heads`, `keys`: the groups that exchange them; `gathers`: keys and
    values come at once. `attend`: attention of whole sequences; `partial`: to some of the keys, where keys are
    exchanged. `overlap`: a ring's messages travel during attention.
    """

    heads: Group
    keys: Group
    attend: CoreAttention
    partial: PartialAttention | None = None
    gathers: bool = False
    overlap: bool = True

    def attention(
        self,
        q_sbnd: Tensor,
        k_sbnd: Tensor,
        v_sbnd: Tensor,
        mask: AttentionMask,
        shard: SequenceShard,
        layer: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with this rank's q [s / cp, b, heads, d] and k, v [s / cp, b, kv heads, d], and to `sinks` [heads];
        result as q. `mask`: of this rank's heads, without dropout.
        """
        if self.heads.size > 1:
            label = Label.for_layer(layer, "heads")
            q_sbnd, k_sbnd, v_sbnd = _exchange_tokens(q_sbnd, k_sbnd, v_sbnd, self.heads, label)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q_sbnd, k_sbnd, v_sbnd))
        own = self.heads.index * q.shape[1]  # the place of the first of this rank's heads among those of q
        mask = mask._replace(heads=mask.heads[own : own + q.shape[1]])
        if self.keys.size == 1 and sinks is None:
            out = self.attend(q, k, v, mask)
        else:
            assert self.partial is not None, "ranks that exchange keys attend to some keys at a time"
            firsts = range(0, len(shard.parts), self.heads.size)
            parts = tuple(shard.joined(first, self.heads.size) for first in firsts)
            visible = VisibleScores(replace(shard, parts=parts, index=shard.index // self.heads.size), mask)
            exchange = (AllGatherKV if self.gathers else partial(RingKV, overlap=self.overlap))(
                self.keys, visible, layer
            )
            out = attend_to_all(q, k, v, exchange, self.partial, sinks, own)
        out_sbnd = out.permute(2, 0, 1, 3)
        if self.heads.size > 1:
            out_sbnd = _exchange_heads(out_sbnd, self.heads, Label.for_layer(layer, "attention"))
        return out_sbnd


def _exchange_tokens(q: Tensor, k: Tensor, v: Tensor, group: Group, label: Label) -> tuple[Tensor, ...]:
    """Map q, k and v [n, b, heads, d] of the ranks' own tokens to [ranks x n, b, heads / ranks, d] of all tokens."""
    ranks = group.size
    heads = [t if t.shape[2] % ranks == 0 else t.repeat_interleave(ranks // t.shape[2], 2) for t in (q, k, v)]
    by_rank = [t.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4) for t in heads]
    exchanged = _AllToAll.apply(torch.cat(by_rank, 3), group, label)
    return exchanged.flatten(0, 1).split([t.shape[3] for t in by_rank], 2)


def _exchange_heads(out: Tensor, group: Group, label: Label) -> Tensor:
    """Map out [ranks x n, b, heads / ranks, d] of all tokens to [n, b, heads, d] of this rank's tokens."""
    exchanged = _AllToAll.apply(out.unflatten(0, (group.size, -1)), group, label)
    return exchanged.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _AllToAll(torch.autograd.Function):
    """x [ranks, ...]: row i goes to rank i. The transpose is an all-to-all as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, label: Label) -> Tensor:
        ctx.group, ctx.label = group, label
        return _all_to_all(x, group, label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _all_to_all(grads[0], ctx.group, ctx.label.for_backward("gradient")), None, None


def _all_to_all(x: Tensor, group: Group, label: Label) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    all_to_all(group, out, x, label=label)
    return out
