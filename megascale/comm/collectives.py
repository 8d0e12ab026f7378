"""The collectives: all-reduce, all-gather, reduce-scatter and all-to-all, whole or piece by piece.

- `all_reduce`, `all_gather`, `reduce_scatter`: one call for the whole tensor
- `all_to_all`, `send_on`: every rank has a part for every other rank, or one for the next rank
- `all_to_all_v`: a message of any size between every two ranks
- `all_gather_pieces`, `ReduceScatterPieces`: rows arrive or leave in pieces, to overlap with GEMMs on the other rows

Every collective is written to the event log; in a group of one rank nothing is sent. `label` names the tensor: a
layer's `Label`, or a text. With `wait=False` a collective is only started: wait for the returned `Work` before reading
the output or writing the input.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from megascale.comm.group import Group
from megascale.comm.p2p_collectives import P2PTransport, reduce_in_rank_order, same_storage_start
from megascale.comm.work import COMPLETED, Work
from megascale.layout.pieces import split_rows
from megascale.record.label import Label, LabelLike


def all_reduce(group: Group, tensor: Tensor, op: str = "sum", *, label: LabelLike = "", wait: bool = True) -> Work:
    """Reduce `tensor` over the group in place, by `op` "sum" or "max". `tensor` is contiguous, of any shape."""
    transport = group.transport
    if transport is None:
        _check_alone(group)
        return COMPLETED
    return group.issue("all_reduce", label, tensor.nbytes, lambda: transport.all_reduce(tensor, op), wait=wait)


def all_gather(group: Group, out: Tensor, part: Tensor, *, label: LabelLike = "", wait: bool = True) -> Work:
    """Gather the `part` [n, ...] of every rank into `out` [size x n, ...], in rank order. `part` may be a view of this
    rank's rows of `out`.
    """
    _check_rows(group, out, part)
    transport = group.transport
    if transport is None:
        _check_alone(group)
        if not same_storage_start(out, part):
            out.copy_(part)
        return COMPLETED
    return group.issue("all_gather", label, out.nbytes, lambda: transport.all_gather(out, part), wait=wait)


def reduce_scatter(group: Group, out: Tensor, full: Tensor, *, label: LabelLike = "", wait: bool = True) -> Work:
    """Sum `full` [size x n, ...] over the ranks and write this rank's rows to `out` [n, ...]. `out` may be a view of
    this rank's rows of `full`.
    """
    _check_rows(group, full, out)
    transport = group.transport
    if transport is None:
        _check_alone(group)
        if not same_storage_start(out, full):
            out.copy_(full)
        return COMPLETED
    return group.issue("reduce_scatter", label, full.nbytes, lambda: transport.reduce_scatter(out, full), wait=wait)


def all_to_all(group: Group, out: Tensor, full: Tensor, *, label: LabelLike = "", wait: bool = True) -> Work:
    """Send row i of `full` [size, ...] to rank i, and write what rank i sends to row i of `out`. Both are contiguous.
    The group has a `p2p_transport`.
    """
    out[group.index].copy_(full[group.index])
    if group.size == 1:
        return COMPLETED
    transport = _messages_of(group)
    start = functools.partial(transport.all_to_all, full.unbind(), out.unbind())
    return group.issue("all_to_all", label, full.nbytes, start, wait=wait)


def send_on(group: Group, out: Tensor, into: Tensor, to: int, source: int, *, label: LabelLike = "") -> Work:
    """Start sending `out` to the rank `to` of the group, and receiving `into` from `source`, both contiguous. Ranks of
    the group form one or more rings. The group has a `p2p_transport`, and more than one rank.
    """
    transport = _messages_of(group)
    return group.issue("send_on", label, out.nbytes, lambda: transport.send_on(out, into, to, source), wait=False)


def _messages_of(group: Group) -> P2PTransport:
    assert group.p2p_transport is not None, f"group {group.name} has no point-to-point transport"
    return group.p2p_transport


def all_to_all_v(
    group: Group, incoming: Sequence[Tensor], outgoing: Sequence[Tensor], *, label: LabelLike = "", wait: bool = True
) -> Work:
    """Send `outgoing[i]` to group rank i, which receives it in its `incoming`, for every rank i; this rank's own is
    copied. Contiguous tensors of any size, also empty. The event log has the bytes that this rank sends.
    """
    incoming[group.index].copy_(outgoing[group.index])
    transport = group.message_transport
    if transport is None:
        _check_alone(group)
        return COMPLETED
    sent = sum(part.nbytes for index, part in enumerate(outgoing) if index != group.index)
    return group.issue("all_to_all", label, sent, lambda: transport.all_to_all(outgoing, incoming), wait=wait)


def _check_rows(group: Group, whole: Tensor, part: Tensor) -> None:
    """Raise ValueError unless `whole` has the rows of all ranks' parts, as some transports need."""
    if len(whole) != group.size * len(part):
        raise ValueError(f"{group.name}: {len(whole)} rows for {group.size} ranks with {len(part)} each")


def _check_alone(group: Group) -> None:
    assert group.size == 1, f"group {group.name} was opened without collectives"


def all_gather_pieces(
    group: Group, out: Tensor, part: Tensor, num_pieces: int, *, label: LabelLike = ""
) -> list[tuple[list[slice], Work]]:
    """Start an all-gather of `part` [n, ...] into `out` [size x n, ...] that arrives in `num_pieces` pieces of rows.

    Returns, in order of arrival, (row ranges of `out`, work to wait for): first this rank's rows, which are complete,
    then for every piece a few rows of every other rank. The group has a `p2p_transport`. Both tensors are contiguous;
    `part` may not change before the last piece has been waited for.
    """
    transport, n = _messages_of(group), part.shape[0]
    parts = list(out.view(group.size, n, *out.shape[1:]).unbind())
    parts[group.index].copy_(part)
    arriving: list[tuple[list[slice], Work]] = [([_shift(slice(0, n), group.index * n)], COMPLETED)]
    for rows, piece_label in labelled_pieces(n, num_pieces, label):
        outgoing, incoming = [part[rows]] * group.size, [rank_part[rows] for rank_part in parts]
        start = functools.partial(transport.all_to_all, outgoing, incoming)
        pending = group.issue("all_gather", piece_label, part[rows].nbytes * group.size, start, wait=False)
        arriving.append(([_shift(rows, rank * n) for rank in range(group.size) if rank != group.index], pending))
    return arriving


class ReduceScatterPieces:
    """A reduce-scatter of `full` [size x n, ...] into `out` [n, ...] that leaves in `num_pieces` pieces of rows.

    The caller writes the rows of `full` in the order of `rows_per_send` and calls `send_piece` after every entry: an
    entry has a few rows of every other rank, the last entry this rank's rows, which stay here. `wait_and_reduce` ends
    it. Terms are added in rank order. The group has a `p2p_transport`; both tensors are contiguous.
    """

    def __init__(self, group: Group, out: Tensor, full: Tensor, num_pieces: int, *, label: LabelLike = "") -> None:
        self._transport = _messages_of(group)
        n = out.shape[0]
        self._group = group
        self._out = out
        self._parts = list(full.view(group.size, n, *full.shape[1:]).unbind())
        self._received = list(full.new_empty(group.size - 1, *out.shape).unbind())
        self._received.insert(group.index, self._parts[group.index])
        self._unsent = labelled_pieces(n, num_pieces, label)
        self._pending: list[Work] = []
        peers = [rank for rank in range(group.size) if rank != group.index]
        self.rows_per_send = [[_shift(rows, rank * n) for rank in peers] for rows, _ in self._unsent]
        self.rows_per_send.append([_shift(slice(0, n), group.index * n)])

    def send_piece(self) -> None:
        """Send the rows of the next entry of `rows_per_send`; the caller has written them."""
        if not self._unsent:
            return
        rows, label = self._unsent.pop(0)
        outgoing, incoming = [part[rows] for part in self._parts], [part[rows] for part in self._received]
        nbytes = outgoing[0].nbytes * self._group.size
        start = functools.partial(self._transport.all_to_all, outgoing, incoming)
        self._pending.append(self._group.issue("reduce_scatter", label, nbytes, start, wait=False))

    def wait_and_reduce(self) -> None:
        """Wait for the other ranks' pieces, then sum the terms into `out`."""
        for pending in self._pending:
            pending.wait()
        reduce_in_rank_order(self._out, self._received)


def labelled_pieces(rows: int, num_pieces: int, label: LabelLike) -> list[tuple[slice, Label]]:
    """Cut rows into labelled pieces: "head 1/3", "head 2/3", "head 3/3"; a single piece keeps the label "head"."""
    runs, base_label = split_rows(rows, num_pieces), Label.from_part(label)
    return [
        (run, base_label.with_suffix(f"{index}/{len(runs)}") if len(runs) > 1 else base_label)
        for index, run in enumerate(runs, 1)
    ]


def _shift(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)
