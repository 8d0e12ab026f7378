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
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megascale.comm.group import Group
from megascale.comm.work import COMPLETED, Work
from megascale.ops.grouped_gemm import RowGroups
from megascale.ops.planned_cast import keep_cast
from megascale.ops.quantized import Quantized, RowReader
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


@dataclass
class ExpertChoice:
    """The experts that the tokens of a micro-batch have chosen in a layer: chosen once, and kept for recomputation, in
    which a rounding difference could choose others.

    `experts` [t, k]; the `dispatchers` of blocks of tokens; `counts` [experts], i64: this rank's slots of each expert.
    `padding`: a mask [t, 1] of the tokens that go to no expert, whatever they have chosen. `losses`: this rank's parts
    of the router's losses, by name, without their weights.

    After `release` only counts and losses are left, for the totals of the step.
    """

    experts: Tensor | None
    dispatchers: tuple[Dispatcher, ...]
    counts: Tensor
    padding: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)

    def release(self) -> None:
        """Free all that is of tokens, after the last use."""
        self.experts, self.dispatchers, self.padding = None, (), None


PlanDispatch = Callable[[Tensor, Tensor, Group, Label, ReadCounts], tuple[Dispatcher, ...]]
"""Plans the dispatchers of blocks of tokens, for the chosen experts [t, k], of which each rank of the group holds as
many; a dropped slot has the number of experts. The counts [blocks, experts] are this rank's slots of each expert. The
host waits for the device once.
"""


CastTokens = Callable[[Tensor], Quantized]
"""Quantizes tokens [t, h], each with scales of its own."""


@dataclass
class Exchange:
    """A dispatch, `to_experts`, or a combine. In backward gradients take the other way. `cast`: tokens travel as the
    codes with which experts compute, and `codes` [r, h] are these, once they have arrived.
    """

    dispatcher: Dispatcher
    label: Label
    width: int
    to_experts: bool
    cast: CastTokens | None = None
    codes: Quantized | None = None
    arriving: Packed | None = None
    work: Work = COMPLETED
    read: RowReader | None = None

    def start(self, sent: Packed, *, backward: bool = False) -> None:
        """Send rows or tokens."""
        if self.cast is not None and not backward:
            cast = self.cast(sent.rows)
            self.read, sent = RowReader.of(cast), sent._replace(rows=cast.bytes_of_rows)
        send = self.dispatcher.send_tokens if self.to_experts != backward else self.dispatcher.send_rows
        self.arriving, self.work = send(sent, self.label.for_backward("gradient") if backward else self.label)

    def finish(self, *, backward: bool = False) -> Packed:
        """Wait for what comes."""
        self.work.wait()
        arrived, self.arriving = self.arriving, None
        assert arrived is not None, "an exchange finishes once"
        turn = self.dispatcher.as_rows if self.to_experts != backward else self.dispatcher.as_tokens
        if self.read is None or backward:
            return turn(arrived, self.width)
        rows, weights = turn(arrived, self.read.width)
        self.codes = self.read(rows)
        return Packed(self.codes.decode(), weights)


class InFlight(NamedTuple):
    """A started exchange in forward, and the scalar that connects its start and end in autograd."""

    scalar: Tensor
    exchange: Exchange

    def rows(self) -> tuple[Tensor, Tensor]:
        """Finish a dispatch: rows [r, h] and their weights [r, 1], in the order of `groups`."""
        rows, weights = _Finish.apply(self.scalar, self.exchange)
        if (codes := self.exchange.codes) is not None:
            keep_cast(rows, codes)
            self.exchange.codes = None
        return rows, weights

    def tokens(self) -> Tensor:
        """Finish a combine: the sum of each token's slots [t, h], accumulated in fp32 or fp64."""
        return _Finish.apply(self.scalar, self.exchange)[0]


def start_exchange(
    sent: Tensor, weights: Tensor | None, dispatcher: Dispatcher, label: Label, cast: CastTokens | None = None
) -> InFlight:
    """Start to send tokens [t, h] with their slots' `weights` [t, k] to the experts, as codes with a `cast`; without
    weights, the experts' results [r, h] back.
    """
    exchange = Exchange(dispatcher, label, sent.shape[1], to_experts=weights is not None, cast=cast)
    return InFlight(_Start.apply(sent, weights, exchange), exchange)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.start(Packed(rows, weights))
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.exchange.finish(backward=True), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scalar: Tensor, exchange: Exchange) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(part for part in exchange.finish() if part is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.exchange.start(Packed(*grads), backward=True)
        return grads[0].new_zeros(()), None
