"""The exchange of rows by an all-to-all: a rank sends each slot's row to the rank of its expert.

tokens [t, h] -> slots by expert [t k, h] -> all-to-all -> rows by (source, expert) -> rows by (expert, source)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.comm.collectives import all_to_all, all_to_all_v
from megascale.comm.group import Group
from megascale.comm.work import COMPLETED, Work
from megascale.ops.grouped_gemm import RowGroups
from megascale.parallel.experts.dispatcher import Dispatcher, Packed, ReadCounts
from megascale.record.label import Label


@dataclass(frozen=True)
class AllToAll:
    """Where the slots of a block of tokens go. `slots`: the slot of each row that this rank sends, `chosen` for each
    token; `places` [t k]: the row of each slot, for a dropped slot the number of rows; `sent`, `received`: rows to and
    from each rank of `group`; `order`: the received row of each row by expert, and `back` its inverse, None if they
    have this order already.
    """

    group: Group
    chosen: int
    slots: Tensor
    places: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Tensor | None
    back: Tensor | None
    groups: RowGroups

    def send_tokens(self, tokens: Packed, label: Label) -> tuple[Packed, Work]:
        weights = None if tokens.weights is None else tokens.weights.reshape(-1, 1)[self.slots]
        return self._send(Packed(tokens.rows[self.slots // self.chosen], weights), self.sent, self.received, label)

    def as_rows(self, arrived: Packed, width: int) -> Packed:
        if self.order is not None:
            arrived = Packed(arrived.rows[self.order])
        rows, weights = arrived.parted(width)
        return Packed(rows.contiguous(), weights)

    def send_rows(self, rows: Packed, label: Label) -> tuple[Packed, Work]:
        if self.back is not None:
            rows = Packed(rows.joined().rows[self.back])
        return self._send(rows, self.received, self.sent, label)

    def as_tokens(self, arrived: Packed, width: int) -> Packed:
        weights = None if arrived.weights is None else self._by_slot(arrived.weights)
        rows, weights = Packed(self._by_slot(arrived.rows), weights).parted(width)
        wide = torch.promote_types(rows.dtype, torch.float32)
        tokens = rows.view(-1, self.chosen, width).sum(1, dtype=wide).to(rows.dtype)
        return Packed(tokens, None if weights is None else weights.view(-1, self.chosen))

    def _by_slot(self, arrived: Tensor) -> Tensor:
        """Put rows that have come back into the order of tokens and their slots: [t k, n], zero for dropped slots."""
        if len(arrived) < len(self.places):
            arrived = torch.cat([arrived, arrived.new_zeros(1, arrived.shape[1])])
        return arrived[self.places]

    def _send(
        self, rows: Packed, sent: tuple[int, ...], received: tuple[int, ...], label: Label
    ) -> tuple[Packed, Work]:
        if self.group.size == 1:
            return rows, COMPLETED
        out = rows.joined().rows
        arriving = out.new_empty(sum(received), out.shape[1])
        work = all_to_all_v(self.group, arriving.split(received), out.split(sent), label=label, wait=False)
        return Packed(arriving), work


def plan_all_to_all(
    experts: Tensor, counts: Tensor, group: Group, label: Label, read: ReadCounts
) -> tuple[Dispatcher, ...]:
    """Plan the exchanges of blocks, as in `PlanDispatch`: ranks exchange the counts of all blocks at once."""
    blocks = len(counts)
    to_ranks = counts.view(blocks, group.size, -1).transpose(0, 1).contiguous()
    from_ranks = torch.empty_like(to_ranks)
    all_to_all(group, from_ranks, to_ranks, label=label.with_suffix("counts"))
    both = torch.stack([to_ranks, from_ranks]).transpose(1, 2).contiguous()  # [2, blocks, ranks, local experts]
    with group.recorder.log.device_wait():
        numbers = read(both, experts.numel())
    size, local = counts.shape[1], both.shape[-1]
    by_rank = [numbers[first : first + local] for first in range(0, len(numbers), local)]  # of each rank's experts
    half, dispatchers = len(by_rank) // 2, []
    for block, chosen in enumerate(experts.tensor_split(blocks)):
        ranks = slice(block * group.size, (block + 1) * group.size)
        sent, rows = tuple(map(sum, by_rank[ranks])), by_rank[half:][ranks]
        received, by_expert = tuple(map(sum, rows)), tuple(map(sum, zip(*rows, strict=True)))
        arrived = both[1, block]
        order = None if size == local or local == 1 else _order_by_expert(arrived, sum(received))
        slots = chosen.reshape(-1).argsort(stable=True)
        places = _inverse(slots).clamp_(max=sum(sent))
        dispatchers.append(
            AllToAll(
                group, experts.shape[1], slots[: sum(sent)], places, sent, received, order,
                None if order is None else _inverse(order), RowGroups(by_expert, arrived.sum(0).cumsum(0).int()),
            )
        )  # fmt: skip
    return tuple(dispatchers)


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
