"""Opening a group by its members, and choosing the transport of its collectives: torch.distributed's (NCCL's, or gloo's
for large groups), shared memory, or messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from megascale.comm.group import Group
from megascale.comm.lost_peer import opening_group
from megascale.comm.nccl_options import nccl_options
from megascale.comm.p2p_collectives import MAX_MESSAGE_BYTES, P2PTransport
from megascale.comm.progress import work_wrapper
from megascale.comm.timeout import Timeout
from megascale.comm.work import TransportWork, WrapWork
from megascale.config.launch import NcclConfig
from megascale.record.recorder import Recorder

MAX_DIRECT_RANKS = 8
"""Most ranks of a CPU group with all-to-all messages; larger groups take gloo's ring, which only has neighbours."""


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class ProcessGroupTransport:
    """torch.distributed's collectives of a process group; None stands for the default group of all ranks."""

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


@dataclass(frozen=True)
class GroupOptions:
    """The timeout of a group's operations, and NCCL's share of the GPU."""

    timeout: Timeout = field(default_factory=Timeout)
    nccl: NcclConfig = field(default_factory=NcclConfig)


def open_group(
    name: str,
    ranks: Sequence[int],
    rank: int,
    recorder: Recorder,
    options: GroupOptions | None = None,
    *,
    slot_bytes: int = 0,
    messages: bool = False,
) -> Group:
    """Open a group with its own communicator. A collective of `ranks`.

    `slot_bytes`: slot size of the shared-memory ring on CPUs; 0 for a group without one. `messages`: collectives are
    messages between ranks also on the same host, in the background of compute. A group of neither has no collectives.
    """
    if len(ranks) == 1:
        return Group(name, (rank,), 0, recorder=recorder)
    options = options or GroupOptions()
    process_group = open_process_group(name, ranks, options)
    group = Group(name, tuple(ranks), list(ranks).index(rank), process_group, recorder)
    if slot_bytes or messages:
        open_transport(group, slot_bytes, options.timeout)
    return group


def open_process_group(name: str, ranks: Sequence[int], options: GroupOptions) -> dist.ProcessGroup:
    """Open a torch process group. A collective of `ranks` only: ranks outside the group do not take part.

    `name` begins with the parallelism axis, and is the group's description in NCCL's log and flight recorder.
    """
    timeout = options.timeout.current
    with opening_group(name, ranks, dist.get_rank()):
        process_group = dist.new_group(
            list(ranks),
            timeout=timeout,
            pg_options=nccl_options(dist.get_backend(), name.partition(".")[0], options.nccl, timeout),
            use_local_synchronization=True,
            group_desc=name,
        )
    options.timeout.register_group(process_group)
    return process_group


def open_transport(group: Group, slot_bytes: int, timeout: Timeout) -> None:
    """Set a group's transport: NCCL on a GPU. On CPUs a small group with slots takes shared memory if its ranks are on
    the same host, else all-to-all messages; a large group takes gloo.
    """
    if group.size == 1:
        return
    timer = group.recorder.timer
    max_bytes = MAX_MESSAGE_BYTES if timer.synchronous else None
    wrap_work = work_wrapper(group.name, timer, timeout)
    group.p2p_transport = P2PTransport(group.process_group, group.ranks, group.index, wrap_work, max_bytes)
    group.message_transport = group.p2p_transport
    group.transport = ProcessGroupTransport(group.process_group, work_wrapper(group.name, timer))
    if timer.synchronous and group.size <= MAX_DIRECT_RANKS:
        group.transport = group.p2p_transport
        if not slot_bytes:
            return
        from megascale.comm.shared_memory import open_ring

        if (ring := open_ring(group, slot_bytes)) is not None:
            timeout.register(ring.set_timeout)
            group.transport, group.p2p_transport = ring, None  # the compute thread copies: no overlap
