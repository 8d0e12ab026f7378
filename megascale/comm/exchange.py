"""Collectives on a CPU by direct messages.

gloo's own collectives hand each step to a worker thread; sending every rank its part at once takes less than half
of their time for small groups (docs/performance.md). Sums are formed in the order of the ranks, so every rank
has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.comm.pending import Pending

REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda into, other: into.add_(other),
    "max": lambda into, other: torch.maximum(into, other, out=into),
}

SMALL = 1 << 16
"""Bytes up to which an all-reduce sends the whole tensor to every rank, rather than a share and then the result."""


class _Messages:
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


class Exchange:
    """The collectives of one group: this is rank `index` of `ranks` (their global numbers)."""

    def __init__(self, process_group: dist.ProcessGroup | None, ranks: Sequence[int], index: int) -> None:
        self._process_group = process_group
        self._ranks = ranks
        self._size = len(ranks)
        self._index = index

    def all_gather(self, out: Tensor, part: Tensor) -> Pending:
        """out, flat, is the parts of all ranks in order; part may lie in its place in out."""
        parts = list(out.view(self._size, -1).unbind())
        own = part.view(-1)
        if parts[self._index].data_ptr() != own.data_ptr():
            parts[self._index].copy_(own)
        return _Messages(self._start([own] * self._size, parts))

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Pending:
        """out is this rank's share of the sum of all ranks' full; it may lie in its place in full."""
        parts = list(full.view(self._size, -1).unbind())
        own = out.view(-1)
        received = list(own.new_empty(self._size, own.numel()).unbind())
        received[self._index] = parts[self._index]
        return _Messages(self._start(parts, received), lambda: _combine(own, received, "sum"))

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        """tensor, in place, becomes the sum or maximum over the ranks."""
        flat = tensor.view(-1)
        if self._size == 2 or flat.numel() * flat.element_size() <= SMALL:
            received = list(flat.new_empty(self._size, flat.numel()).unbind())
            received[self._index] = flat
            return _Messages(self._start([flat] * self._size, received), lambda: _combine(flat, received, op))
        shares = list(flat.tensor_split(self._size))
        own = shares[self._index]
        incoming = [torch.empty_like(own) for _ in range(self._size)]
        incoming[self._index] = own
        works = self._start(shares, incoming)

        def finish() -> None:
            _combine(own, incoming, op)
            _Messages(self._start([own] * self._size, shares)).wait()

        return _Messages(works, finish)

    def _start(self, outgoing: list[Tensor], incoming: list[Tensor]) -> list[dist.Work]:
        """Send outgoing[i] to and receive incoming[i] from rank i of the group, for every other rank."""
        works: list[dist.Work | None] = []
        for step in range(1, self._size):  # each rank begins with its neighbour: no rank is sent to by all at once
            to, source = (self._index + step) % self._size, (self._index - step) % self._size
            works.append(dist.isend(outgoing[to], self._ranks[to], group=self._process_group))
            works.append(dist.irecv(incoming[source], self._ranks[source], group=self._process_group))
        return [work for work in works if work is not None]


def _combine(out: Tensor, terms: list[Tensor], op: str) -> None:
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
