"""Collectives by direct messages: every rank sends every other its part at once.

On CPUs gloo's own collectives hand each step to a worker thread; direct messages take less than half of their time in
small groups (docs/performance.md). On any device they let a collective arrive, or leave, piece by piece, while a matrix
product works on the pieces that are here. Sums are formed in the order of the ranks, so every rank has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.comm.pending import Follow, Pending

REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda into, other: into.add_(other),
    "max": lambda into, other: torch.maximum(into, other, out=into),
}

SMALL = 1 << 16
"""Bytes up to which an all-reduce sends the whole tensor to every rank, rather than a share and then the result."""

TAGS = 1 << 30

MESSAGE_BYTES = 1 << 19
"""Most bytes of a message of gloo, which serves the two directions of a connection in turns: one long message each way
takes as long as two, short ones pass each other (docs/performance.md).
"""


class Exchange:
    """The messages of one group: this is rank `index` of `ranks` (their global numbers). `most`: bytes of a message,
    None for no bound.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        index: int,
        follow: Follow,
        most: int | None = None,
    ) -> None:
        self._process_group = process_group
        self._ranks = ranks
        self._size = len(ranks)
        self._index = index
        self._follow = follow
        self._most = most
        self._tag = 0

    def all_gather(self, out: Tensor, part: Tensor) -> Pending:
        """out, flat, is the parts of all ranks in order; part may lie in its place in out."""
        parts = list(out.view(self._size, -1).unbind())
        own = part.view(-1)
        if not same_place(parts[self._index], own):
            parts[self._index].copy_(own)
        return self._follow(self.messages([own] * self._size, parts), None)

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Pending:
        """out is this rank's share of the sum of all ranks' full; it may lie in its place in full."""
        parts = list(full.view(self._size, -1).unbind())
        own = out.view(-1)
        received = list(own.new_empty(self._size - 1, own.numel()).unbind())
        received.insert(self._index, parts[self._index])
        return self._follow(self.messages(parts, received), lambda: combine(own, received, "sum"))

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        """tensor, in place, becomes the sum or maximum over the ranks."""
        flat = tensor.view(-1)
        if self._size == 2 or flat.numel() * flat.element_size() <= SMALL:
            received = list(flat.new_empty(self._size - 1, flat.numel()).unbind())
            received.insert(self._index, flat)
            works = self.messages([flat] * self._size, received)
            return self._follow(works, lambda: combine(flat, received, op))
        shares = list(flat.tensor_split(self._size))
        own = shares[self._index]
        incoming = [torch.empty_like(own) for _ in range(self._size)]
        incoming[self._index] = own
        works, results = self.messages(shares, incoming), self._next_tag()

        def finish() -> None:
            combine(own, incoming, op)
            for work in self.messages([own] * self._size, shares, results):
                work.wait()

        return self._follow(works, finish)

    def round(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Pending:
        """Send outgoing[i] to and receive incoming[i] from rank i of the group, for every other rank."""
        return self._follow(self.messages(outgoing, incoming), None)

    def messages(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int | None = None
    ) -> list[dist.Work]:
        """The works of one round. Its tag is its own, so rounds may be started in any order; NCCL has no tags and
        only ever gets them in the same order.
        """
        tag = self._next_tag() if tag is None else tag
        operations: list[dist.P2POp] = []
        for step in range(1, self._size):  # each rank begins with its neighbour: no rank is sent to by all at once
            to, source = (self._index + step) % self._size, (self._index - step) % self._size
            group = self._process_group
            for out, into in zip_longest(self._cut(outgoing[to]), self._cut(incoming[source])):
                if out is not None:
                    operations.append(dist.P2POp(dist.isend, out, self._ranks[to], group, tag))
                if into is not None:
                    operations.append(dist.P2POp(dist.irecv, into, self._ranks[source], group, tag))
        return dist.batch_isend_irecv(operations)

    def _cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """A tensor as messages; those of one tag arrive in the order in which they are sent."""
        count = -(-tensor.nbytes // self._most) if self._most else 1
        return tensor.view(-1).chunk(count) if count > 1 else (tensor,)

    def _next_tag(self) -> int:
        self._tag = (self._tag + 1) % TAGS
        return self._tag


def same_place(one: Tensor, other: Tensor) -> bool:
    """Whether both begin at the same number of the same storage. Their addresses would say so too, but for tensors
    without memory.
    """
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and one.storage_offset() == other.storage_offset()


def combine(out: Tensor, terms: Sequence[Tensor], op: str = "sum") -> None:
    """out = the terms combined in order; out may be one of them."""
    reduce = REDUCE[op]
    if len(terms) == 2 and same_place(terms[0], out):
        reduce(out, terms[1])
        return
    if len(terms) == 2 and same_place(terms[1], out):
        reduce(out, terms[0])
        return
    total = terms[0].clone()
    for term in terms[1:]:
        reduce(total, term)
    out.copy_(total)
