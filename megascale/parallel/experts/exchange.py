"""The exchange of tokens between the ranks that hold different experts (expert parallelism, Lepikhin et al. 2020).

A token has k *slots*, one for each chosen expert. Rows of slots go to the expert's rank, and come back:

    tokens [t, h] -> slots by expert [t k, h] -> all-to-all -> rows by (source, expert) -> rows by (expert, source)

Every step is a gather by a permutation, forward and backward, so that sums have a fixed order and no atomic additions.
A rank without rows takes part in every all-to-all. `Exchange` is made once for a micro-batch and layer, with one copy
of counts to the host; backward and recomputation use it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.comm.collectives import all_to_all, all_to_all_v
from megascale.comm.group import Group
from megascale.comm.work import COMPLETED, Work
from megascale.ops.grouped_gemm import RowGroups
from megascale.record.label import Label, LabelLike

ReadCounts = Callable[[Tensor, int], list[int]]
"""Copies counts of rows to the host, which waits for the device. The second argument: the slots of this rank."""


@dataclass(frozen=True)
class Exchange:
    """Where the slots of a micro-batch go. `slots`: the slot of each row that this rank sends; `places` [t k]: the row
    of each slot, for a dropped slot the number of rows; `sent`, `received`: rows to and from each rank of `group`;
    `order`: the received row of each row by expert, and `back` its inverse, None if they have this order already;
    `groups`: the rows of this rank's experts.
    """

    group: Group
    slots: Tensor
    places: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Tensor | None
    back: Tensor | None
    groups: RowGroups

    def to_experts(self, rows: Tensor, label: LabelLike) -> Tensor:
        """Send rows in the order of `slots` [t k, n] to the experts' ranks: [r, n], by expert."""
        arriving, work = self.send_to_experts(rows, label)
        work.wait()
        return self.by_expert(arriving)

    def to_tokens(self, rows: Tensor, label: LabelLike) -> Tensor:
        """Send rows by expert [r, n] back: [t k, n], in the order of tokens."""
        arriving, work = self.send_to_tokens(rows, label)
        work.wait()
        return self.by_slot(arriving)

    def send_to_experts(self, rows: Tensor, label: LabelLike) -> tuple[Tensor, Work]:
        """Start to send rows in the order of `slots`: what arrives is in the order of ranks."""
        return self._send(rows, self.sent, self.received, label)

    def send_to_tokens(self, rows: Tensor, label: LabelLike) -> tuple[Tensor, Work]:
        """Start to send rows by expert back: what arrives is in the order of `slots`."""
        return self._send(rows if self.back is None else rows[self.back], self.received, self.sent, label)

    def by_expert(self, arrived: Tensor) -> Tensor:
        """Put rows that have arrived at their experts' rank into the order of experts."""
        return arrived if self.order is None else arrived[self.order]

    def by_slot(self, arrived: Tensor) -> Tensor:
        """Put rows that have come back into the order of tokens and their slots: [t k, n], zero for dropped slots."""
        if len(arrived) < len(self.places):
            arrived = torch.cat([arrived, arrived.new_zeros(1, arrived.shape[1])])
        return arrived[self.places]

    def _send(
        self, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], label: LabelLike
    ) -> tuple[Tensor, Work]:
        if self.group.size == 1:
            return rows, COMPLETED
        arriving = rows.new_empty(sum(received), rows.shape[1])
        return arriving, all_to_all_v(self.group, arriving.split(received), rows.split(sent), label=label, wait=False)


def make_exchange(experts: Tensor, counts: Tensor, group: Group, label: Label, read: ReadCounts) -> Exchange:
    """Plan the exchange for chosen `experts` [t, k], of which each rank of the group holds as many; a dropped slot has
    the number of experts. `counts` [experts]: the slots of each expert on this rank. The host waits for the device
    once.
    """
    slots = experts.view(-1).argsort(stable=True)
    to_ranks = counts.view(group.size, -1)
    from_ranks = torch.empty_like(to_ranks)
    all_to_all(group, from_ranks, to_ranks, label=label.with_suffix("counts"))
    local = from_ranks.shape[1]
    with group.recorder.log.device_wait():
        numbers = read(torch.stack([to_ranks, from_ranks]).view(-1), experts.numel())
    half = len(numbers) // 2
    sent = tuple(sum(numbers[rank * local : (rank + 1) * local]) for rank in range(group.size))
    rows = [numbers[half + rank * local : half + (rank + 1) * local] for rank in range(group.size)]
    by_expert = tuple(sum(of_rank[expert] for of_rank in rows) for expert in range(local))
    received = tuple(map(sum, rows))
    ends = from_ranks.sum(0).cumsum(0).int()
    order = None if group.size == 1 or local == 1 else _order_by_expert(from_ranks, sum(received))
    back = None if order is None else _inverse(order)
    rows_sent = sum(sent)
    places = _inverse(slots).clamp_(max=rows_sent)
    return Exchange(group, slots[:rows_sent], places, sent, received, order, back, RowGroups(by_expert, ends))


def _order_by_expert(counts: Tensor, rows: int) -> Tensor:
    """Return the place among rows by (source, expert), of `counts` [sources, experts], of each row by (expert, source).
    `rows`: in all.
    """
    lengths = counts.t().reshape(-1)
    starts = (counts.view(-1).cumsum(0) - counts.view(-1)).view(counts.shape).t().reshape(-1)
    shift = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(rows, device=counts.device) + shift.repeat_interleave(lengths, output_size=rows)


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation), device=permutation.device)
    return inverse


def dispatch(x: Tensor, weights: Tensor, exchange: Exchange, label: Label) -> tuple[Tensor, Tensor]:
    """Send tokens x [t, h] and their slots' `weights` [t, k] to the experts: rows [r, h] and their weights [r, 1], in
    the order of `exchange.groups`.
    """
    return _Dispatch.apply(x, weights, exchange, label)


@dataclass
class Flight:
    """Rows on their way, in forward or in backward: `arriving` is complete after `land`."""

    arriving: Tensor | None = None
    work: Work = COMPLETED

    def land(self) -> Tensor:
        """Wait for the rows."""
        self.work.wait()
        rows, self.arriving = self.arriving, None
        assert rows is not None, "rows land once"
        return rows


def start_combine(rows: Tensor, exchange: Exchange, label: Label) -> tuple[Tensor, Flight]:
    """Start to send the experts' results [r, h] back. What is computed before `finish_combine` overlaps with the
    exchange, in forward and in backward. Returns a scalar, which connects the two in autograd, and the flight.
    """
    flight = Flight()
    return _StartCombine.apply(rows, exchange, flight, label), flight


def finish_combine(started: Tensor, flight: Flight, exchange: Exchange, slots: int, label: Label) -> Tensor:
    """Add up the `slots` of each token in their order: [t, h], accumulated in fp32 or fp64 and rounded once."""
    return _FinishCombine.apply(started, exchange, flight, slots, label)


def _pack(rows: Tensor, weights: Tensor) -> Tensor:
    """Join rows [n, h] and their weights [n, 1], of another dtype perhaps, as further columns."""
    return torch.cat([rows, weights.view(rows.dtype)], -1)


def _unpack(packed: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return packed[:, :width].contiguous(), packed[:, width:].contiguous().view(dtype)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, exchange: Exchange, label: Label) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.label, ctx.slots, ctx.dtype = exchange, label, weights.shape[1], weights.dtype
        rows, row_weights = x[exchange.slots // ctx.slots], weights.view(-1, 1)[exchange.slots]
        if exchange.group.size == 1:
            return rows, row_weights
        return _unpack(exchange.to_experts(_pack(rows, row_weights), label), x.shape[1], weights.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange, label = ctx.exchange, ctx.label.for_backward("gradient")
        if exchange.group.size == 1:
            rows, weights = (exchange.to_tokens(grad, label) for grad in grads)
        else:
            packed = exchange.to_tokens(_pack(*grads), label)
            rows, weights = _unpack(packed, grads[0].shape[1], ctx.dtype)
        return _sum_of_slots(rows, ctx.slots), weights.view(-1, ctx.slots), None, None


class _StartCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange, flight: Flight, label: Label) -> Tensor:
        ctx.exchange, ctx.flight = exchange, flight
        flight.arriving, flight.work = exchange.send_to_tokens(rows, label)
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.by_expert(ctx.flight.land()), None, None, None


class _FinishCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, exchange: Exchange, flight: Flight, slots: int, label: Label) -> Tensor:
        ctx.exchange, ctx.flight, ctx.slots, ctx.label = exchange, flight, slots, label
        return _sum_of_slots(exchange.by_slot(flight.land()), slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), label = grads, ctx.label.for_backward("gradient")
        ctx.flight.arriving, ctx.flight.work = ctx.exchange.send_to_experts(
            grad[ctx.exchange.slots // ctx.slots], label
        )
        return grad.new_zeros(()), None, None, None, None


def _sum_of_slots(rows: Tensor, slots: int) -> Tensor:
    """Add up each token's slots, rows [t k, h], in fp32 or fp64: [t, h] in the dtype of the rows."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows.view(-1, slots, rows.shape[1]).sum(1, dtype=wide).to(rows.dtype)
