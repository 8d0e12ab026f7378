"""Linear attention of tokens that follow others: of other ranks (LASP+, MiniMax-01, Li et al. 2025), or of chunks.

Spans of tokens tile a sequence, and a rank has some of them. The state before a span is that of all spans before it,
and the gradient of the state after a span that of all spans after it: `ops.linear_attention` advances both by spans as
it does by blocks.

    ranks   every rank sends the states of its own spans, d^2 elements a head each, and then knows all
    chunks  a chunk takes the state that the one before has left, and leaves the gradient of it

`GatheredStates`, `StoredStates`: the two ways, as a `StateExchange`. `linear_attention`: the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megascale.comm.collectives import all_gather
from megascale.comm.group import Group
from megascale.layout.sequence_shard import SequenceShard, Spans, TokenSpan
from megascale.ops.linear_attention import Decays, attend, attend_backward, state_after, state_gradient
from megascale.parallel.kv_store import KVStore
from megascale.record.label import Label

States = Sequence[Tensor | None]
"""States [b, heads, d, d] by span, or their gradients; None for zeros."""

Attend = Callable[[States], Sequence[Tensor]]
"""Attends in a rank's spans after the states before them; returns those after. Of gradients the other way."""


class StateExchange(Protocol):
    """The way in which the states between spans come. `own` computes those of a rank's spans alone, by span."""

    def forward(self, own: Callable[[], list[Tensor]], decays: Decays, attend: Attend) -> States:
        """Attend; return the states before the spans."""

    def backward(self, own: Callable[[], list[Tensor]], decays: Decays, attend: Attend) -> None:
        """Attend backward, after the gradients of the states after the spans."""


class GatheredStates(StateExchange):
    """The states of all spans of a context-parallel group come at once. `groups`: along which the ranks of `shard` are
    numbered, fastest first. Ranks with fewer spans than others send zeros.
    """

    def __init__(self, groups: Sequence[Group], shard: SequenceShard, label: Label) -> None:
        self._groups = groups
        self._label = label
        self._most = max(map(len, shard.parts))
        self._own = shard.spans
        self._rows = sorted(
            (span, rank * self._most + place)
            for rank, part in enumerate(shard.parts)
            for place, span in enumerate(part)
        )

    def forward(self, own: Callable[[], list[Tensor]], decays: Decays, attend: Attend) -> States:
        states = self._gather(own(), decays, self._rows, self._label)
        attend(states)
        return states

    def backward(self, own: Callable[[], list[Tensor]], decays: Decays, attend: Attend) -> None:
        attend(self._gather(own(), decays, reversed(self._rows), self._label.for_backward("gradient")))

    def _gather(
        self, own: list[Tensor], decays: Decays, rows: Iterable[tuple[TokenSpan, int]], label: Label
    ) -> States:  # fmt: skip
        """Gather what all ranks send [ranks x spans, b, heads, d, d], and advance a state through the spans in an
        order; return it as it is where it comes to the own ones.
        """
        full = torch.stack([*own, *[torch.zeros_like(own[0])] * (self._most - len(own))])
        for group in self._groups:
            part, full = full, full.new_empty(group.size * len(full), *full.shape[1:])
            all_gather(group, full, part, label=label)
        state: Tensor | None = None
        found = dict[TokenSpan, Tensor | None]()
        for span, row in rows:
            found[span] = state
            state = decays.advance(state, span, full[row])
        return [found[span] for span in self._own]


class StoredStates(StateExchange):
    """The states between the chunks of a sequence are in a store, as their keys and values are. A chunk is a span."""

    def __init__(self, store: KVStore, chunk: SequenceShard, layer: int) -> None:
        self._store = store
        self._chunk = chunk
        self._before, self._place = ((layer, index) for index in (chunk.index - 1, chunk.index))

    def forward(self, own: Callable[[], list[Tensor]], decays: Decays, attend: Attend) -> States:
        states = [self._store.blocks[self._before] if self._chunk.index else None]
        (after,) = attend(states)
        if not self._chunk.is_last:
            self._store.blocks[self._place] = after
        return states

    def backward(self, own: Callable[[], list[Tensor]], decays: Decays, attend: Attend) -> None:
        (before,) = attend([None if self._chunk.is_last else self._store.grads.pop(self._place)])
        self._store.blocks.pop(self._place, None)
        if self._chunk.index:
            self._store.grads[self._before] = before


def linear_attention(
    qkv: Tensor, spans: Spans, rates: Tensor, documents: Tensor | None, exchange: StateExchange
) -> Tensor:
    """Attend with what is projected to q, k and v [n, b, 3, heads, d] of the tokens of `spans`; result
    [n, b, heads, d]. `rates`, `documents` as of `Decays`.
    """
    return _LinearAttention.apply(qkv, spans, rates, documents, exchange)


class _LinearAttention(torch.autograd.Function):
    """Saves what is projected and the state before each span."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, spans: Spans, rates: Tensor, documents: Tensor | None, exchange: StateExchange
    ) -> Tensor:
        out, decays = qkv.new_empty(*qkv.shape[:2], *qkv.shape[3:]), Decays(rates, documents)
        sizes = [span.size for span in spans]
        parts = list(zip(spans, qkv.split(sizes), out.split(sizes), strict=True))
        states = exchange.forward(
            lambda: [state_after(rows, span, decays) for span, rows, _ in parts],
            decays,
            lambda states: [attend(*part, decays, state) for part, state in zip(parts, states, strict=True)],
        )
        ctx.save_for_backward(qkv, rates, documents, *states)
        ctx.spans, ctx.exchange = spans, exchange
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, rates, documents, *states = ctx.saved_tensors
        sizes, grad_qkv, decays = [span.size for span in ctx.spans], qkv.new_empty(qkv.shape), Decays(rates, documents)
        parts = list(zip(ctx.spans, qkv.split(sizes), grads[0].split(sizes), grad_qkv.split(sizes), strict=True))
        ctx.exchange.backward(
            lambda: [state_gradient(rows, grad, span, decays) for span, rows, grad, _ in parts],
            decays,
            lambda after: [
                attend_backward(*part, decays, state, grad)
                for part, state, grad in zip(parts, states, after, strict=True)
            ],
        )
        return grad_qkv, None, None, None, None
