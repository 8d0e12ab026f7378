"""The collectives. Each is counted in its group; in a group of one it does nothing.

With `wait=False` a collective is only started, and the returned `Pending` must be waited for before its tensors are
used.
"""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from megascale.comm.group import Group
from megascale.comm.pending import DONE, Pending

T = TypeVar("T")

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def all_reduce(group: Group, tensor: Tensor, op: str = "sum", *, wait: bool = True) -> Pending:
    """Sum or maximum of `tensor` over the group, in place. Contiguous, any shape."""
    if group.size == 1:
        return DONE
    group.count("all_reduce", tensor.nbytes)
    if group.transport is not None:
        return _finish(group.transport.all_reduce(tensor, op), wait)
    return _finish(dist.all_reduce(tensor, _OPS[op], group.process_group, async_op=True), wait)


def all_gather(group: Group, out: Tensor, part: Tensor, *, wait: bool = True) -> Pending:
    """`out` [size x n, ...]: the `part` [n, ...] of each rank in order. `part` may be its own place in `out`."""
    if group.size == 1:
        if out.data_ptr() != part.data_ptr():
            out.copy_(part)
        return DONE
    group.count("all_gather", out.nbytes)
    if group.transport is not None:
        return _finish(group.transport.all_gather(out, part), wait)
    return _finish(dist.all_gather_into_tensor(out, part, group.process_group, async_op=True), wait)


def reduce_scatter(group: Group, out: Tensor, full: Tensor, *, wait: bool = True) -> Pending:
    """`out` [n, ...]: this rank's part of the sum of `full` [size x n, ...]. `out` may be its own place in `full`."""
    if group.size == 1:
        if out.data_ptr() != full.data_ptr():
            out.copy_(full)
        return DONE
    group.count("reduce_scatter", full.nbytes)
    if group.transport is not None:
        return _finish(group.transport.reduce_scatter(out, full), wait)
    return _finish(dist.reduce_scatter_tensor(out, full, group=group.process_group, async_op=True), wait)


def barrier(group: Group) -> None:
    """Return when every rank of the group has come here."""
    if group.size > 1:
        group.count("barrier", 0)
        dist.barrier(group.process_group)


def broadcast_object(group: Group, value: T) -> T:
    """The first rank's value, on every rank. For small control data only."""
    if group.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group.ranks[0], group.process_group)
    return box[0]


def gather_objects(group: Group, value: T) -> list[T]:
    """The value of each rank in order, on every rank. For small control data only."""
    if group.size == 1:
        return [value]
    found: list[T] = [value] * group.size
    dist.all_gather_object(found, value, group.process_group)
    return found


def _finish(pending: Pending | None, wait: bool) -> Pending:
    if pending is None:
        return DONE
    if wait:
        pending.wait()
        return DONE
    return pending
