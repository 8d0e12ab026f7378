"""The exchange of tokens by an all-gather: every rank has all tokens of its group, and adds up its experts' results.

    tokens [t, h] -> all-gather [n t, h] -> rows by (expert, source)
    rows -> their sums by token [n t, h] -> all-to-all [n, t, h] -> sums over the ranks [t, h]

A rank sends T h (n - 1) elements to n - 1 others, whatever the choices are; an all-to-all sends k T h (n - 1) / n. Sums
of a rank's rows are rounded once, to the dtype of the rows; the sum over ranks is in fp32 and in their order, as in
MegaScale-MoE (Jin et al. 2025), which a library's reduce-scatter in bf16 is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.comm.collectives import all_gather, all_to_all_v
from megascale.comm.group import Group
from megascale.comm.work import Work
from megascale.ops.embedding_rows import add_rows_
from megascale.ops.grouped_gemm import RowGroups
from megascale.ops.routing import count_choices
from megascale.parallel.experts.all_to_all import plan_all_to_all
from megascale.parallel.experts.dispatcher import Dispatcher, Packed, ReadCounts
from megascale.record.label import Label


@dataclass(frozen=True)
class AllGather:
    """The slots of this rank's experts in a block of `tokens` of all ranks of `group`. `slots`: the slot of each row,
    `chosen` for each token.
    """

    group: Group
    chosen: int
    tokens: int
    slots: Tensor
    groups: RowGroups

    def send_tokens(self, tokens: Packed, label: Label) -> tuple[Packed, Work]:
        part = tokens.joined().rows.contiguous()
        every = part.new_empty(self.tokens, part.shape[1])
        return Packed(every), all_gather(self.group, every, part, label=label, wait=False)

    def as_rows(self, arrived: Packed, width: int) -> Packed:
        rows, weights = arrived.parted(width)
        return Packed(rows[self.slots // self.chosen], None if weights is None else weights.view(-1, 1)[self.slots])

    def send_rows(self, rows: Packed, label: Label) -> tuple[Packed, Work]:
        weights = rows.weights
        if weights is not None:  # a slot has its weight on one rank
            weights = weights.new_zeros(self.tokens * self.chosen).scatter_(0, self.slots, weights.view(-1))
            weights = weights.view(-1, self.chosen)
        part = Packed(self._sums(rows.rows), weights).joined().rows
        arriving, size = torch.empty_like(part), self.group.size
        work = all_to_all_v(self.group, arriving.chunk(size), part.chunk(size), label=label, wait=False)
        return Packed(arriving), work

    def _sums(self, rows: Tensor) -> Tensor:
        """Add up the rows of each token [n t, h]."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        sums = rows.new_zeros(self.tokens, rows.shape[1], dtype=wide)
        add_rows_(sums, self.slots // self.chosen, rows.to(wide))
        return sums.to(rows.dtype)

    def as_tokens(self, arrived: Packed, width: int) -> Packed:
        rows, weights = arrived.parted(width)
        size, wide = self.group.size, torch.promote_types(rows.dtype, torch.float32)
        tokens = rows.view(size, -1, width).sum(0, dtype=wide).to(rows.dtype)
        return Packed(tokens, None if weights is None else weights.view(size, -1, self.chosen).sum(0))


def plan_all_gather(
    experts: Tensor, counts: Tensor, group: Group, label: Label, read: ReadCounts
) -> tuple[Dispatcher, ...]:
    """Plan the exchanges of blocks, as in `PlanDispatch`. Ranks gather all choices, and count their experts'."""
    if group.size == 1:
        return plan_all_to_all(experts, counts, group, label, read)
    blocks, local, chosen = len(counts), counts.shape[1] // group.size, experts.shape[1]
    every = experts.new_empty(group.size * len(experts), chosen)
    all_gather(group, every, experts, label=label.with_suffix("choices"))
    own = every - group.index * local
    own = own.masked_fill((own < 0) | (own >= local), local)  # slots of other ranks' experts come last
    own = own.view(group.size, blocks, -1).transpose(0, 1).reshape(blocks, -1)
    found = count_choices(own, local)
    with group.recorder.log.device_wait():
        numbers = read(found.unsqueeze(0), experts.numel())
    dispatchers = []
    for block in range(blocks):
        groups = RowGroups(tuple(numbers[block * local : (block + 1) * local]), found[block].cumsum(0).int())
        slots = own[block].argsort(stable=True)[: sum(groups.counts)].clone()  # not the storage of all slots
        dispatchers.append(AllGather(group, chosen, len(every) // blocks, slots, groups))
    return tuple(dispatchers)
