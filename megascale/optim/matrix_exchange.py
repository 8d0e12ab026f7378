"""The exchange of a bucket's matrices between the shards that store them and the owners that update them.

    start_gather    flat shard   -- all-to-all over dp -->  tp shards of the matrices that this dp rank owns
    finish_gather   tp shards    -- all-to-all over tp -->  whole matrices [m, n] that this rank owns
    start_return    whole updates  -- all-to-all over tp -->  tp shards of updates
    finish_return   tp shards    -- all-to-all over dp -->  flat ranges of this rank's shard

Every rank of a group takes part in every exchange of a bucket with matrices, with or without elements to send. Whether
a rank owns a matrix, and which elements each message has, follows from the layout alone (`layout.owners`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megascale.comm.collectives import all_to_all_v
from megascale.comm.group import Group
from megascale.comm.mesh import Mesh
from megascale.comm.work import COMPLETED, Work
from megascale.layout.buckets import SlotRange
from megascale.layout.owners import OwnedMatrix
from megascale.parallel.bucket import Bucket

Pieces = list[tuple[int, SlotRange]]
"""Elements of this tp rank's shards of matrices, with the matrices' numbers."""


class MatrixExchange:
    """Gathers the matrices `places` of a bucket on their owners and returns updates; one exchange at a time.

    `owned`: the numbers of the matrices that this rank owns.
    """

    def __init__(self, bucket: Bucket, places: Sequence[OwnedMatrix], mesh: Mesh) -> None:
        self._places, self._layout, self._topology = places, bucket.layout, mesh.topology
        self._tp, self._dp = mesh.tp, bucket.storage.shards
        self._label, self._first = bucket.label, bucket.shard[0]
        self._dtype, self._device = bucket.grad.dtype, bucket.grad.device
        self._work: Work = COMPLETED
        self._incoming: list[Tensor] = []
        self._outgoing: list[Tensor] = []
        self._own: dict[int, Tensor] = {}  # tp shards that do not leave the rank, by number
        self._flat = self._new(0)
        me, ranks = self._dp.index, range(self._dp.size)
        self._on_dp_rank = [number for number, place in enumerate(places) if place.dp_owner in (None, me)]
        owners = {number: places[number].tp_owner for number in self._on_dp_rank}
        self.owned = [number for number, owner in owners.items() if owner in (None, self._tp.index)]
        # By tp rank: the matrices whose only owner it is, with this rank's dp.
        self._of_tp_rank = [[n for n, owner in owners.items() if owner == tp] for tp in range(self._tp.size)]
        self._crosses_tp = self._tp.size > 1 and any(self._of_tp_rank)
        # Pieces that stay on this dp rank, and by dp rank those that go there, and come from there.
        self._kept = self._pieces(me, me)
        self._sent = [self._pieces(me, owner) if owner != me else [] for owner in ranks]
        self._received = [self._pieces(source, me) if source != me else [] for source in ranks]

    @property
    def is_local(self) -> bool:
        """No matrix crosses a link."""
        return self._dp.size == 1 and not self._crosses_tp

    def stored(self, number: int) -> SlotRange:
        """Return the elements of this tp rank's shard of a matrix."""
        return self._places[number].stored(self._topology, self._tp.index)

    def _pieces(self, source: int, owner: int) -> Pieces:
        """List the pieces that dp rank `source` stores of matrices on dp rank `owner`."""
        shard = self._layout.state_range(source)
        on_owner = (number for number, place in enumerate(self._places) if place.dp_owner in (None, owner))
        found = ((number, self.stored(number).clipped(*shard)) for number in on_owner)
        return [(number, piece) for number, piece in found if piece.numel > 0]

    def start_gather(self, flat: Tensor) -> None:
        """Start to send this rank's shard `flat` [elements of the shard] of the matrices to their dp owners. It may
        change after `finish_gather`, and after the use of the matrices.
        """
        self._flat = flat
        self._outgoing = [self._join([piece.view(flat, self._first) for _, piece in sent]) for sent in self._sent]
        self._incoming = [self._empty(pieces) for pieces in self._received]
        self._start(self._dp, "matrices")

    def finish_gather(self) -> dict[int, Tensor]:
        """Return the whole matrices that this rank owns, by number; views of `flat` where it has all of a matrix."""
        self._work.wait()
        shards, me = self._gathered_shards(), self._tp.index
        mine, ranks = self._of_tp_rank[me], range(self._tp.size)
        sizes = [[self._places[n].stored(self._topology, source).numel for n in mine] for source in ranks]
        self._outgoing = [self._join([shards[n] for n in self._of_tp_rank[tp] if tp != me]) for tp in ranks]
        self._incoming = [self._new(sum(sizes[source]) if source != me else 0) for source in ranks]
        if self._crosses_tp:
            self._start(self._tp, "matrices")
            self._work.wait()
        by_source = [
            [shards[n] for n in mine] if source == me else message.split(sizes[source])
            for source, message in enumerate(self._incoming)
        ]
        self.release()
        matrices = {}
        for number, *parts in zip(mine, *by_source, strict=True):
            place = self._places[number]
            cut = [part.view(place.local_shape(self._topology, tp)) for tp, part in enumerate(parts)]
            matrices[number] = torch.cat(cut, place.tensor.sharding["tp"]) if len(cut) > 1 else cut[0]
        for number in self.owned:  # of those, tp replicates the others
            if number not in matrices:
                matrices[number] = shards[number].view(self._places[number].local_shape(self._topology, me))
        return matrices

    def _gathered_shards(self) -> dict[int, Tensor]:
        """Return this tp rank's shards of the matrices whose owner is on this dp rank, by number."""
        shards, kept = dict[int, Tensor](), dict(self._kept)
        for number in self._on_dp_rank:
            piece, stored = kept.get(number), self.stored(number)
            if piece == stored:
                shards[number] = stored.view(self._flat, self._first)
                continue
            shards[number] = self._new(stored.numel)
            if piece is not None:
                piece.view(shards[number], stored.start)[:] = piece.view(self._flat, self._first)
        for number, piece, part in self._parts(self._received):
            piece.view(shards[number], self.stored(number).start)[:] = part
        return shards

    def start_return(self, updates: Iterable[tuple[int, Tensor]]) -> None:
        """Start to send the updates [m, n] of this rank's matrices, by number, to the shards. An update is asked for
        once the one before it is in the messages, so that a single one is whole.
        """
        ranks, me = range(self._tp.size), self._tp.index
        mine = self._of_tp_rank[me]
        sizes = [[self._places[n].stored(self._topology, tp).numel for n in mine] for tp in ranks]
        messages = [self._new(sum(of_rank)) for of_rank in sizes]
        places = [message.split(of_rank) for message, of_rank in zip(messages, sizes, strict=True)]
        by_number = dict(zip(mine, zip(*places, strict=True), strict=True))
        for number, update in updates:
            if number in by_number:
                for place, shard in zip(by_number[number], self._cut(number, update), strict=True):
                    place.view(shard.shape).copy_(shard)
            else:
                self._own[number] = update.to(self._dtype).reshape(-1)
            del update  # before the next one is computed
        self._own |= {number: parts[me] for number, parts in by_number.items()}
        self._outgoing = [self._new(0) if rank == me else message for rank, message in enumerate(messages)]
        self._incoming = [
            self._new(sum(self.stored(n).numel for n in self._of_tp_rank[tp] if tp != me)) for tp in ranks
        ]
        if self._crosses_tp:
            self._start(self._tp, "updates")

    def finish_return(self) -> list[tuple[int, SlotRange, Tensor]]:
        """Return the updates of this rank's shard: number of the matrix, elements, and values."""
        self._work.wait()
        shards = self._own
        for tp, message in enumerate(self._incoming):
            numbers = self._of_tp_rank[tp] if tp != self._tp.index else []
            sizes = [self.stored(number).numel for number in numbers]
            shards |= dict(zip(numbers, message.split(sizes), strict=True)) if numbers else {}

        def piece_of(number: int, piece: SlotRange) -> Tensor:
            return piece.view(shards[number], self.stored(number).start)

        self._outgoing = [self._join([piece_of(*piece) for piece in pieces]) for pieces in self._received]
        self._incoming = [self._empty(pieces) for pieces in self._sent]
        self._start(self._dp, "updates")
        self._work.wait()
        found = [(*piece, piece_of(*piece)) for piece in self._kept]
        found += self._parts(self._sent)
        self.release()
        return found

    def release(self) -> None:
        """Free the messages of a completed exchange."""
        self._incoming, self._outgoing, self._own, self._flat = [], [], {}, self._new(0)

    def _cut(self, number: int, update: Tensor) -> Sequence[Tensor]:
        """Cut an update into tp shards, views of it."""
        place = self._places[number]
        dimension = place.tensor.sharding["tp"]
        sizes = [place.local_shape(self._topology, tp)[dimension] for tp in range(self._tp.size)]
        return update.split(sizes, dimension)

    def _start(self, group: Group, what: str) -> None:
        self._work = all_to_all_v(group, self._incoming, self._outgoing, label=f"{self._label} {what}", wait=False)

    def _parts(self, messages: Sequence[Pieces]) -> Iterator[tuple[int, SlotRange, Tensor]]:
        """Yield the pieces of the messages that have arrived: number, elements and values."""
        for message, pieces in zip(self._incoming, messages, strict=True):
            values = message.split([piece.numel for _, piece in pieces]) if pieces else ()
            yield from ((number, piece, part) for (number, piece), part in zip(pieces, values, strict=True))

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)) if parts else self._new(0)

    def _empty(self, pieces: Pieces) -> Tensor:
        return self._new(sum(piece.numel for _, piece in pieces))

    def _new(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self._dtype, device=self._device)
