"""Collectives on a CPU by direct messages.

gloo's own collectives hand each step to a worker thread; sending every rank its part at once takes a quarter to a half of
their time for groups of up to eight (docs/performance.md). Sums are formed in the order of the ranks, so every rank has
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.comm.group import Group, Pending

REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda into, other: into.add_(other),
    "max": lambda into, other: torch.maximum(into, other, out=into),
}

SMALL = 1 << 16
"""Bytes up to which an all-reduce sends the whole tensor to every rank, rather than a share and then the result."""


class _Exchange:
    """Messages under way, and what to do when they have arrived."""

    def __init__(self, works: list[dist.Work], finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        if self._finish is not None:
            self._finish()
            self._finish = None


def _start(group: Group, outgoing: list[Tensor], incoming: list[Tensor]) -> list[dist.Work]:
    """Send outgoing[i] to and receive incoming[i] from rank i of the group, for every other rank."""
    works = []
    for step in range(1, group.size):  # each rank begins with its neighbour, so that no rank is sent to by all at once
        to, source = (group.index + step) % group.size, (group.index - step) % group.size
        works.append(dist.isend(outgoing[to], group.ranks[to], group=group.process_group))
        works.append(dist.irecv(incoming[source], group.ranks[source], group=group.process_group))
    return works


def all_gather(group: Group, out: Tensor, part: Tensor) -> Pending:
    """out, flat, is the parts of all ranks in order; part may lie in its place in out."""
    parts = list(out.view(group.size, -1).unbind())
    own = part.view(-1)
    if parts[group.index].data_ptr() != own.data_ptr():
        parts[group.index].copy_(own)
    return _Exchange(_start(group, [own] * group.size, parts))


def reduce_scatter(group: Group, out: Tensor, full: Tensor) -> Pending:
    """out is this rank's share of the sum of all ranks' full; it may lie in its place in full."""
    parts = list(full.view(group.size, -1).unbind())
    own = out.view(-1)
    received = list(own.new_empty(group.size, own.numel()).unbind())
    received[group.index] = parts[group.index]

    def finish() -> None:
        _sum_into(own, received, "sum")

    return _Exchange(_start(group, parts, received), finish)


def all_reduce(group: Group, tensor: Tensor, op: str) -> Pending:
    """tensor, in place, becomes the sum or maximum over the ranks."""
    flat = tensor.view(-1)
    if group.size == 2 or flat.numel() * flat.element_size() <= SMALL:
        received = list(flat.new_empty(group.size, flat.numel()).unbind())
        received[group.index] = flat
        works = _start(group, [flat] * group.size, received)
        return _Exchange(works, lambda: _sum_into(flat, received, op))
    shares = list(flat.tensor_split(group.size))
    own = shares[group.index]
    incoming = [torch.empty_like(own) for _ in range(group.size)]
    incoming[group.index] = own
    works = _start(group, shares, incoming)

    def finish() -> None:
        _sum_into(own, incoming, op)
        _Exchange(_start(group, [own] * group.size, shares)).wait()

    return _Exchange(works, finish)


def _sum_into(out: Tensor, terms: list[Tensor], op: str) -> None:
    """out = the terms combined in order; out may be one of them."""
    combine = REDUCE[op]
    if len(terms) == 2 and terms[0].data_ptr() == out.data_ptr():
        combine(out, terms[1])
        return
    if len(terms) == 2 and terms[1].data_ptr() == out.data_ptr():
        combine(out, terms[0])
        return
    total = terms[0].clone()
    for term in terms[1:]:
        combine(total, term)
    out.copy_(total)
