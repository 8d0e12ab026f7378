"""The collectives. Each goes into the ledger under its name; in a group of one it does nothing.

`what` labels the tensor concerned, with a text where that is no layer's. With `wait=False` a collective is only
started, and what it returns must be waited for before its tensors are used.
"""

from __future__ import annotations

import functools

from torch import Tensor

from megascale.comm.exchange import combine, same_place
from megascale.comm.group import Group
from megascale.comm.pending import DONE, Awaitable
from megascale.core.label import Label, What
from megascale.layout.pieces import pieces_of


def all_reduce(group: Group, tensor: Tensor, op: str = "sum", *, what: What = "", wait: bool = True) -> Awaitable:
    """Sum or maximum of `tensor` over the group, in place. Contiguous, any shape."""
    transport = group.transport
    if transport is None:
        _check_alone(group)
        return DONE
    return group.begin("all_reduce", what, tensor.nbytes, lambda: transport.all_reduce(tensor, op), wait=wait)


def all_gather(group: Group, out: Tensor, part: Tensor, *, what: What = "", wait: bool = True) -> Awaitable:
    """`out` [size x n, ...]: the `part` [n, ...] of each rank in order. `part` may be its own place in `out`."""
    transport = group.transport
    if transport is None:
        _check_alone(group)
        if not same_place(out, part):
            out.copy_(part)
        return DONE
    return group.begin("all_gather", what, out.nbytes, lambda: transport.all_gather(out, part), wait=wait)


def reduce_scatter(group: Group, out: Tensor, full: Tensor, *, what: What = "", wait: bool = True) -> Awaitable:
    """`out` [n, ...]: this rank's part of the sum of `full` [size x n, ...]. `out` may be its own place in `full`."""
    transport = group.transport
    if transport is None:
        _check_alone(group)
        if not same_place(out, full):
            out.copy_(full)
        return DONE
    return group.begin("reduce_scatter", what, full.nbytes, lambda: transport.reduce_scatter(out, full), wait=wait)


def _check_alone(group: Group) -> None:
    assert group.size == 1, f"group {group.name} was opened without collectives"


def all_gather_pieces(
    group: Group, out: Tensor, part: Tensor, pieces: int, *, what: What = ""
) -> list[tuple[list[slice], Awaitable]]:
    """An all-gather along dimension 0 that arrives piece by piece, in a group with an `exchange`. Returns the rows of
    `out` [size x n, ...] that come together, with what to wait for: first this rank's own, then in each piece some rows
    of every other rank. Both tensors are contiguous; `part` may not change until the last has been waited for.
    """
    exchange, n = group.exchange, part.shape[0]
    assert exchange is not None, "pieces travel by direct messages"
    parts = list(out.view(group.size, n, *out.shape[1:]).unbind())
    parts[group.index].copy_(part)
    arriving: list[tuple[list[slice], Awaitable]] = [([_shift(slice(0, n), group.index * n)], DONE)]
    for rows, label in labelled(n, pieces, what):
        outgoing, incoming = [part[rows]] * group.size, [other[rows] for other in parts]
        start = functools.partial(exchange.round, outgoing, incoming)
        pending = group.begin("all_gather", label, part[rows].nbytes * group.size, start, wait=False)
        arriving.append(([_shift(rows, rank * n) for rank in range(group.size) if rank != group.index], pending))
    return arriving


class ReduceScatterPieces:
    """A reduce-scatter along dimension 0 of `full` [size x n, ...] into `out` [n, ...] that leaves piece by piece.

    For a group with an `exchange`; both tensors are contiguous. `waves` are the rows to be written into `full` before
    each `send`: in each some rows of every other rank, at last this rank's own, which stay. Ranks are summed in their
    order.
    """

    def __init__(self, group: Group, out: Tensor, full: Tensor, pieces: int, *, what: What = "") -> None:
        assert group.exchange is not None, "pieces travel by direct messages"
        n = out.shape[0]
        self._group = group
        self._out = out
        self._parts = list(full.view(group.size, n, *full.shape[1:]).unbind())
        self._received = list(full.new_empty(group.size - 1, *out.shape).unbind())
        self._received.insert(group.index, self._parts[group.index])
        self._left = labelled(n, pieces, what)
        self._pending: list[Awaitable] = []
        others = [rank for rank in range(group.size) if rank != group.index]
        self.waves = [[_shift(rows, rank * n) for rank in others] for rows, _ in self._left]
        self.waves.append([_shift(slice(0, n), group.index * n)])

    def send(self) -> None:
        """The next wave is written: send it."""
        if not self._left:
            return
        rows, label = self._left.pop(0)
        outgoing, incoming = [part[rows] for part in self._parts], [part[rows] for part in self._received]
        exchange = self._group.exchange
        assert exchange is not None
        nbytes = outgoing[0].nbytes * self._group.size
        start = functools.partial(exchange.round, outgoing, incoming)
        self._pending.append(self._group.begin("reduce_scatter", label, nbytes, start, wait=False))

    def finish(self) -> None:
        """Wait for what the others have sent, and sum."""
        for pending in self._pending:
            pending.wait()
        combine(self._out, self._received)


def labelled(rows: int, pieces: int, what: What) -> list[tuple[slice, Label]]:
    """Cut rows into pieces, each with its label: "head 1/3", "head 2/3", "head 3/3"; "head" where there is but one."""
    runs, label = pieces_of(rows, pieces), Label.of(what)
    return [(run, label.then(f"{index}/{len(runs)}") if len(runs) > 1 else label) for index, run in enumerate(runs, 1)]


def _shift(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)
