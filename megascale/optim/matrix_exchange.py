"""The exchange of a bucket's matrices between the shards that store them and the owners that update them.

    start_gather    flat shard   -- all-to-all over dp -->  tp shards of the matrices that this dp rank owns
    finish_gather   tp shards    -- all-to-all over tp -->  whole matrices [m, n] that this rank owns
    start_return    whole updates  -- all-to-all over tp -->  tp shards of updates
    finish_return   tp shards    -- all-to-all over dp -->  flat ranges of this rank's shard

Every rank of a group takes part in every exchange of a bucket with matrices, with or without elements to send. Whether
a rank owns a matrix, and which elements each message has, follows from the layout alone (`layout.owners`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.comm.collectives import all_to_all_v
from megascale.comm.group import Group
from megascale.comm.mesh import Mesh
from megascale.comm.work import COMPLETED, Work
from megascale.layout.buckets import SlotRange
from megascale.layout.owners import OwnedMatrix
from megascale.parallel.param_and_grad_buffers import Bucket

Pieces = list[tuple[int, SlotRange]]
"""Elements of this tp rank's shards of matrices, with the matrices' numbers."""


class _Routes:
    """The ways of a bucket's matrices to their owners and back, which follow from the layout alone."""

    def __init__(self, bucket: Bucket, places: Sequence[OwnedMatrix], mesh: Mesh) -> None:
        self.places = places
        self.tp, self.dp = mesh.tp, bucket.storage.shards
        self._layout, self._topology = bucket.layout, mesh.topology

    def on_dp_rank(self) -> list[int]:
        """List the matrices whose owner is on this dp rank."""
        owners = (None, self.dp.index)
        return [number for number, place in enumerate(self.places) if place.dp_owner in owners]

    def on_tp_rank(self, tp: int) -> list[int]:
        """List the matrices whose only owner is the rank at `tp` and this rank's dp."""
        return [number for number in self.on_dp_rank() if self.places[number].tp_owner == tp]

    def stored(self, number: int, tp: int) -> SlotRange:
        """Return the elements of a tp rank's shard of a matrix."""
        return self.places[number].stored(self._topology, tp)

    def pieces(self, source: int, owner: int) -> Pieces:
        """List the pieces that dp rank `source` stores of matrices on dp rank `owner`."""
        shard = self._layout.shard_range(source, self.dp.size)
        found = (
            (number, self.stored(number, self.tp.index).clipped(*shard))
            for number, place in enumerate(self.places)
            if place.dp_owner in (None, owner)
        )
        return [(number, piece) for number, piece in found if piece.numel > 0]

    def message(self, source: int, owner: int) -> Pieces:
        """List the pieces that dp rank `source` sends to dp rank `owner`: none to itself."""
        return self.pieces(source, owner) if source != owner else []

    def others(self, tp: int) -> list[int]:
        """List the matrices on the rank at another `tp`, as `on_tp_rank`; none on this rank."""
        return self.on_tp_rank(tp) if tp != self.tp.index else []

    def joined(self, number: int, parts: Sequence[Tensor]) -> Tensor:
        """Join the tp shards of a matrix."""
        place = self.places[number]
        shards = [part.view(place.local_shape(self._topology, tp)) for tp, part in enumerate(parts)]
        return torch.cat(shards, place.tensor.sharding["tp"]) if len(shards) > 1 else shards[0]

    def cut(self, number: int, update: Tensor) -> list[Tensor]:
        """Cut an update into tp shards."""
        place = self.places[number]
        dimension = place.tensor.sharding["tp"]
        sizes = [place.local_shape(self._topology, tp)[dimension] for tp in range(self.tp.size)]
        return [shard.reshape(-1) for shard in update.split(sizes, dimension)]

    def local_shape(self, number: int, tp: int) -> tuple[int, int]:
        """Rows and columns of a tp rank's shard of a matrix."""
        return self.places[number].local_shape(self._topology, tp)


class MatrixExchange:
    """Gathers the matrices of a bucket on their owners and returns updates; one exchange at a time."""

    def __init__(self, bucket: Bucket, places: Sequence[OwnedMatrix], mesh: Mesh) -> None:
        self._routes = routes = _Routes(bucket, places, mesh)
        self._tp, self._dp = routes.tp, routes.dp
        self._label, self._first = bucket.label, bucket.shard[0]
        self._dtype, self._device = bucket.grad.dtype, bucket.grad.device
        self._work: Work = COMPLETED
        self._incoming: list[Tensor] = []
        self._outgoing: list[Tensor] = []
        self._own: dict[int, Tensor] = {}  # tp shards that do not leave the rank, by number
        self._flat = self._new(0)
        on_dp_rank = (places[number] for number in routes.on_dp_rank())
        self._crosses_tp = self._tp.size > 1 and any(place.tp_owner is not None for place in on_dp_rank)

    @property
    def owned(self) -> list[int]:
        """The numbers of the matrices that this rank owns."""
        return [
            number
            for number in self._routes.on_dp_rank()
            if self._routes.places[number].tp_owner in (None, self._tp.index)
        ]

    @property
    def is_local(self) -> bool:
        """No matrix crosses a link."""
        return self._dp.size == 1 and not self._crosses_tp

    def stored(self, number: int) -> SlotRange:
        """Return the elements of this tp rank's shard of a matrix."""
        return self._routes.stored(number, self._tp.index)

    def start_gather(self, flat: Tensor) -> None:
        """Start to send this rank's shard `flat` [elements of the shard] of the matrices to their dp owners. It may
        change after `finish_gather`, and after the use of the matrices.
        """
        me, self._flat = self._dp.index, flat
        self._outgoing = [
            self._join([piece.view(flat, self._first) for _, piece in self._routes.message(me, owner)])
            for owner in range(self._dp.size)
        ]
        self._incoming = [self._empty(self._routes.message(source, me)) for source in range(self._dp.size)]
        self._start(self._dp, "matrices")

    def finish_gather(self) -> dict[int, Tensor]:
        """Return the whole matrices that this rank owns, by number; views of `flat` where it has all of a matrix."""
        self._work.wait()
        shards, mine, me = self._gathered_shards(), self._routes.on_tp_rank(self._tp.index), self._tp.index
        ranks = range(self._tp.size)
        self._outgoing = [self._join([shards[number] for number in self._routes.others(owner)]) for owner in ranks]
        self._incoming = [
            self._new(sum(self._routes.stored(n, source).numel for n in mine) if source != me else 0)
            for source in ranks
        ]
        if self._crosses_tp:
            self._start(self._tp, "matrices")
            self._work.wait()
        by_source = [
            [shards[n] for n in mine]
            if source == me
            else message.split([self._routes.stored(n, source).numel for n in mine])
            for source, message in enumerate(self._incoming)
        ]
        self.release()
        matrices = {number: self._routes.joined(number, parts) for number, *parts in zip(mine, *by_source, strict=True)}
        for number in self.owned:  # of those, tp replicates the others
            if number not in matrices:
                matrices[number] = shards[number].view(self._routes.local_shape(number, me))
        return matrices

    def _gathered_shards(self) -> dict[int, Tensor]:
        """Return this tp rank's shards of the matrices whose owner is on this dp rank, by number."""
        me, shards = self._dp.index, dict[int, Tensor]()
        own = dict(self._routes.pieces(me, me))
        for number in self._routes.on_dp_rank():
            piece, stored = own.get(number), self.stored(number)
            if piece == stored:
                shards[number] = stored.view(self._flat, self._first)
                continue
            shards[number] = self._new(stored.numel)
            if piece is not None:
                piece.view(shards[number], stored.start)[:] = piece.view(self._flat, self._first)
        for source, message in enumerate(self._incoming):
            for (number, piece), part in self._split(message, self._routes.message(source, me)):
                piece.view(shards[number], self.stored(number).start)[:] = part
        return shards

    def start_return(self, updates: dict[int, Tensor]) -> None:
        """Start to send the updates [m, n] of this rank's matrices, by number, to the shards."""
        ranks, mine, me = range(self._tp.size), self._routes.on_tp_rank(self._tp.index), self._tp.index
        updates = {number: update.to(self._dtype) for number, update in updates.items()}
        cut = {number: self._routes.cut(number, updates[number]) for number in mine}
        self._own = {number: updates[number].reshape(-1) for number in updates if number not in cut}
        self._own |= {number: cut[number][me].clone() for number in mine}  # a view would keep the update
        self._outgoing = [self._join([cut[number][rank] for number in mine] if rank != me else []) for rank in ranks]
        numbers = [self._routes.others(owner) for owner in ranks]
        self._incoming = [self._new(sum(self.stored(number).numel for number in of_owner)) for of_owner in numbers]
        if self._crosses_tp:
            self._start(self._tp, "updates")

    def finish_return(self) -> list[tuple[int, SlotRange, Tensor]]:
        """Return the updates of this rank's shard: number of the matrix, elements, and values."""
        self._work.wait()
        me, shards = self._dp.index, self._own
        for owner, message in enumerate(self._incoming):
            numbers = self._routes.others(owner)
            sizes = [self.stored(number).numel for number in numbers]
            shards |= dict(zip(numbers, message.split(sizes), strict=True)) if numbers else {}
        ranks = range(self._dp.size)
        self._outgoing = [
            self._join([p.view(shards[n], self.stored(n).start) for n, p in self._routes.message(rank, me)])
            for rank in ranks
        ]
        self._incoming = [self._empty(self._routes.message(me, owner)) for owner in ranks]
        self._start(self._dp, "updates")
        self._work.wait()
        own = self._routes.pieces(me, me)
        received = [((n, piece), piece.view(shards[n], self.stored(n).start)) for n, piece in own]
        for owner, message in enumerate(self._incoming):
            received += self._split(message, self._routes.message(me, owner))
        self.release()
        return [(number, piece, part) for (number, piece), part in received]

    def release(self) -> None:
        """Free the messages of a completed exchange."""
        self._incoming, self._outgoing, self._own, self._flat = [], [], {}, self._new(0)

    def _start(self, group: Group, what: str) -> None:
        self._work = all_to_all_v(group, self._incoming, self._outgoing, label=f"{self._label} {what}", wait=False)

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)) if parts else self._new(0)

    def _split(self, message: Tensor, pieces: Pieces) -> list[tuple[tuple[int, SlotRange], Tensor]]:
        parts = message.split([piece.numel for _, piece in pieces]) if pieces else ()
        return list(zip(pieces, parts, strict=True))

    def _empty(self, pieces: Pieces) -> Tensor:
        return self._new(sum(piece.numel for _, piece in pieces))

    def _new(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self._dtype, device=self._device)
