"""The way of tokens to the ranks of their experts and back (expert parallelism, Lepikhin et al. 2020).

A token has k *slots*, one for each chosen expert. A `Dispatcher` brings tokens [t, h] to *rows* [r, h], those of this
rank's experts in the order of experts, and back, in forward and, for gradients, in backward:

    dispatch   tokens and weights -> rows and their weights     backward: send_rows, as_tokens
    combine    rows -> tokens, the sum over slots               backward: send_tokens, as_rows

What is computed between the start of a way and its end overlaps with the exchange. Every step is a gather by a
permutation or a sum in a fixed order, without atomic additions. A rank without rows takes part in every exchange. A
dispatcher is planned once for a micro-batch and layer; backward and recomputation use it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megascale.comm.group import Group
from megascale.comm.work import COMPLETED, Work
from megascale.ops.grouped_gemm import RowGroups
from megascale.record.label import Label

ReadCounts = Callable[[Tensor, int], list[int]]
"""Copies counts of rows [n, ...] to the host, which waits for the device. The second argument: the sum of each of n."""


class Packed(NamedTuple):
    """Rows or tokens [n, h], and their `weights`. On their way the weights are further columns of `rows`, unless the
    group is of one rank.
    """

    rows: Tensor
    weights: Tensor | None = None

    def joined(self) -> Packed:
        """Join weights of any dtype to the rows."""
        if self.weights is None:
            return self
        return Packed(torch.cat([self.rows, self.weights.contiguous().view(self.rows.dtype)], -1))

    def parted(self, width: int) -> Packed:
        """Part the weights from rows of `width`, a view; they are in fp32, or in fp64 of fp64."""
        if self.rows.shape[1] == width:
            return self
        weights = self.rows[:, width:].contiguous().view(torch.promote_types(self.rows.dtype, torch.float32))
        return Packed(self.rows[:, :width], weights)


class Dispatcher(Protocol):
    """The exchange of a block of tokens. `groups`: the rows of this rank's experts. Weights are [t, k] of tokens, and
    [r, 1] of rows. `send_tokens` and `send_rows` start an exchange, whose result `as_rows` and `as_tokens` turn into
    rows and tokens of `width`.
    """

    @property
    def groups(self) -> RowGroups: ...

    def send_tokens(self, tokens: Packed, label: Label) -> tuple[Packed, Work]: ...

    def as_rows(self, arrived: Packed, width: int) -> Packed: ...

    def send_rows(self, rows: Packed, label: Label) -> tuple[Packed, Work]: ...

    def as_tokens(self, arrived: Packed, width: int) -> Packed: ...


class PlanDispatch(Protocol):
    """Plans the dispatchers of blocks of tokens, for chosen `experts` [t, k], of which each rank of the group holds as
    many; a dropped slot has the number of experts. `counts` [blocks, experts]: the slots of each expert on this rank.
    The host waits for the device once.
    """

    def __call__(
        self, experts: Tensor, counts: Tensor, group: Group, label: Label, read: ReadCounts
    ) -> tuple[Dispatcher, ...]: ...


@dataclass
class Flight:
    """One way through a dispatcher: `to_experts`, or back. In backward gradients take the other way."""

    dispatcher: Dispatcher
    label: Label
    width: int
    to_experts: bool
    arriving: Packed | None = None
    work: Work = COMPLETED

    def leave(self, sent: Packed, *, backward: bool = False) -> None:
        """Start the exchange."""
        send = self.dispatcher.send_tokens if self.to_experts != backward else self.dispatcher.send_rows
        self.arriving, self.work = send(sent, self.label.for_backward("gradient") if backward else self.label)

    def land(self, *, backward: bool = False) -> Packed:
        """Wait for what comes."""
        self.work.wait()
        arrived, self.arriving = self.arriving, None
        assert arrived is not None, "rows land once"
        turn = self.dispatcher.as_rows if self.to_experts != backward else self.dispatcher.as_tokens
        return turn(arrived, self.width)


class Started(NamedTuple):
    """A flight in forward, and the scalar that connects its start and end in autograd."""

    scalar: Tensor
    flight: Flight

    def rows(self) -> tuple[Tensor, Tensor]:
        """End a dispatch: rows [r, h] and their weights [r, 1], in the order of `groups`."""
        return _Land.apply(self.scalar, self.flight)

    def tokens(self) -> Tensor:
        """End a combine: the sum of each token's slots [t, h], accumulated in fp32 or fp64."""
        return _Land.apply(self.scalar, self.flight)[0]


def start_dispatch(x: Tensor, weights: Tensor, dispatcher: Dispatcher, label: Label) -> Started:
    """Start to send tokens x [t, h] and their slots' `weights` [t, k] to the experts."""
    flight = Flight(dispatcher, label, x.shape[1], to_experts=True)
    return Started(_Leave.apply(x, weights, flight), flight)


def start_combine(rows: Tensor, dispatcher: Dispatcher, label: Label) -> Started:
    """Start to send the experts' results [r, h] back."""
    flight = Flight(dispatcher, label, rows.shape[1], to_experts=False)
    return Started(_Leave.apply(rows, None, flight), flight)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.leave(Packed(rows, weights))
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.flight.land(backward=True), None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scalar: Tensor, flight: Flight) -> tuple[Tensor, ...]:
        ctx.flight = flight
        return tuple(part for part in flight.land() if part is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.flight.leave(Packed(*grads), backward=True)
        return grads[0].new_zeros(()), None
