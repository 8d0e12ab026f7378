"""Collectives made of point-to-point messages: every rank sends its part to every other rank at once.

On CPUs gloo's collectives hand every step to a worker thread; in small groups direct messages take less than half the
time (docs/results/overlap.md). On any device a collective can arrive or leave in pieces that overlap with GEMMs. Terms
are added in rank order, and all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.comm.work import TransportWork, WrapWork

REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda out, term: out.add_(term),
    "max": lambda out, term: torch.maximum(out, term, out=out),
}

DIRECT_ALL_REDUCE_BYTES = 1 << 16
"""Bytes up to which an all-reduce sends the full tensor to every rank, not a reduce-scatter and an all-gather."""

TAGS = 1 << 30

RING_TAG = TAGS  # the tag of messages in rings

MAX_MESSAGE_BYTES = 1 << 19
"""Most bytes of a gloo message. gloo serves the two directions of a connection in turns: long messages wait for the
opposite direction, short messages overlap (docs/results/overlap.md).
"""


class P2PTransport:
    """The point-to-point transport of a group, on rank `index` of its global `ranks`. Longer messages than
    `max_message_bytes` are cut; None: no limit.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        index: int,
        wrap_work: WrapWork,
        max_message_bytes: int | None = None,
    ) -> None:
        self._process_group = process_group
        self._ranks = ranks
        self._size = len(ranks)
        self._index = index
        self._wrap_work = wrap_work
        self._max_message_bytes = max_message_bytes
        self._tag = 0

    def all_gather(self, out: Tensor, part: Tensor) -> TransportWork:
        """Gather every rank's `part` into `out` in rank order. `part` may be a view of this rank's place in `out`."""
        parts = list(out.view(self._size, -1).unbind())
        flat = part.view(-1)
        if not same_storage_start(parts[self._index], flat):
            parts[self._index].copy_(flat)
        return self._wrap_work(self.post_messages([flat] * self._size, parts), None)

    def reduce_scatter(self, out: Tensor, full: Tensor) -> TransportWork:
        """Sum `full` over the ranks and write this rank's shard to `out`. `out` may be a view of a part of `full`."""
        parts = list(full.view(self._size, -1).unbind())
        flat = out.view(-1)
        received = list(flat.new_empty(self._size - 1, flat.numel()).unbind())
        received.insert(self._index, parts[self._index])
        return self._wrap_work(self.post_messages(parts, received), lambda: reduce_in_rank_order(flat, received, "sum"))

    def all_reduce(self, tensor: Tensor, op: str) -> TransportWork:
        """Reduce `tensor` over the ranks in place, by `op` "sum" or "max"."""
        flat = tensor.view(-1)
        if self._size == 2 or flat.numel() * flat.element_size() <= DIRECT_ALL_REDUCE_BYTES:
            received = list(flat.new_empty(self._size - 1, flat.numel()).unbind())
            received.insert(self._index, flat)
            works = self.post_messages([flat] * self._size, received)
            return self._wrap_work(works, lambda: reduce_in_rank_order(flat, received, op))
        shards = list(flat.tensor_split(self._size))
        shard = shards[self._index]
        incoming = [torch.empty_like(shard) for _ in range(self._size)]
        incoming[self._index] = shard
        works, gather_tag = self.post_messages(shards, incoming), self._next_tag()

        def reduce_and_gather() -> None:
            reduce_in_rank_order(shard, incoming, op)
            for work in self.post_messages([shard] * self._size, shards, gather_tag):
                work.wait()

        return self._wrap_work(works, reduce_and_gather)

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> TransportWork:
        """Send `outgoing[i]` to group rank i and receive `incoming[i]` from group rank i, for every other rank i. Empty
        tensors are not sent.
        """
        return self._wrap_work(self.post_messages(outgoing, incoming), None)

    def send_on(self, out: Tensor, into: Tensor, to: int, source: int) -> TransportWork:
        """Send `out` to the rank `to` of the group, and receive `into` from `source`. They have a tag of
        their own: ranks in different rings have sent different numbers of messages.
        """
        pieces = zip_longest(self._cut(out), self._cut(into))
        messages = [(self._ranks[to], self._ranks[source], *pair) for pair in pieces]
        return self._wrap_work(self._post(messages, RING_TAG), None)

    def post_messages(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int | None = None
    ) -> list[dist.Work]:
        """Post the messages of an all-to-all. Its own tag lets gloo's ranks start several in any order; NCCL has no
        tags, and its ranks start them in the same order.
        """
        tag = self._next_tag() if tag is None else tag
        messages = list[tuple[int, int, Tensor | None, Tensor | None]]()
        for step in range(1, self._size):  # begin with the neighbour, to spread the load over the ranks
            to, source = (self._index + step) % self._size, (self._index - step) % self._size
            pieces = zip_longest(self._cut(outgoing[to]), self._cut(incoming[source]))
            messages += [(self._ranks[to], self._ranks[source], *pair) for pair in pieces]
        return self._post(messages, tag)

    def _post(self, messages: Sequence[tuple[int, int, Tensor | None, Tensor | None]], tag: int) -> list[dist.Work]:
        """Post messages (receiver, sender, tensor to send, tensor to receive), of which a tensor may be missing."""
        operations, group = list[dist.P2POp](), self._process_group
        for to, source, out, into in messages:
            if out is not None:
                operations.append(dist.P2POp(dist.isend, out, to, group, tag))
            if into is not None:
                operations.append(dist.P2POp(dist.irecv, into, source, group, tag))
        return dist.batch_isend_irecv(operations) if operations else []

    def _cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """Cut a tensor into messages; messages of a tag arrive in the order of their sends. None for an empty one."""
        if not tensor.numel():
            return ()
        count = -(-tensor.nbytes // self._max_message_bytes) if self._max_message_bytes else 1
        return tensor.view(-1).chunk(count) if count > 1 else (tensor,)

    def _next_tag(self) -> int:
        self._tag = (self._tag + 1) % TAGS
        return self._tag


def same_storage_start(a: Tensor, b: Tensor) -> bool:
    """Return True if both tensors begin at the same element of the same storage. Fake tensors have no addresses."""
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same and a.storage_offset() == b.storage_offset()


def reduce_in_rank_order(out: Tensor, terms: Sequence[Tensor], op: str = "sum") -> None:
    """Reduce `terms` in order into `out`, which may be a term."""
    reduce = REDUCE[op]
    if len(terms) == 2 and same_storage_start(terms[0], out):
        reduce(out, terms[1])
        return
    if len(terms) == 2 and same_storage_start(terms[1], out):
        reduce(out, terms[0])
        return
    total = terms[0].clone()
    for term in terms[1:]:
        reduce(total, term)
    out.copy_(total)
