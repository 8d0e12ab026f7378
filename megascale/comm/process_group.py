"""The transport that calls torch.distributed's own collectives: NCCL's, or gloo's for large groups."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megascale.comm.work import TransportWork, WrapWork

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class ProcessGroupTransport:
    """The collectives of a process group; None stands for the default group of all ranks."""

    def __init__(self, process_group: dist.ProcessGroup | None, wrap_work: WrapWork) -> None:
        self._process_group = process_group
        self._wrap_work = wrap_work

    def all_reduce(self, tensor: Tensor, op: str) -> TransportWork:
        return self._wrap_work([dist.all_reduce(tensor, _OPS[op], self._process_group, async_op=True)], None)

    def all_gather(self, out: Tensor, part: Tensor) -> TransportWork:
        return self._wrap_work([dist.all_gather_into_tensor(out, part, self._process_group, async_op=True)], None)

    def reduce_scatter(self, out: Tensor, full: Tensor) -> TransportWork:
        work = dist.reduce_scatter_tensor(out, full, group=self._process_group, async_op=True)
        return self._wrap_work([work], None)
