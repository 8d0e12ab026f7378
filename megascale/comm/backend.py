"""The collectives of the backend itself: NCCL's, or gloo's for large groups."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megascale.comm.pending import Follow, Pending

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Backend:
    """The collectives of one group, None for the group of all ranks."""

    def __init__(self, process_group: dist.ProcessGroup | None, follow: Follow) -> None:
        self._process_group = process_group
        self._follow = follow

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        return self._follow([dist.all_reduce(tensor, _OPS[op], self._process_group, async_op=True)], None)

    def all_gather(self, out: Tensor, part: Tensor) -> Pending:
        return self._follow([dist.all_gather_into_tensor(out, part, self._process_group, async_op=True)], None)

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Pending:
        work = dist.reduce_scatter_tensor(out, full, group=self._process_group, async_op=True)
        return self._follow([work], None)
