"""Communication groups. `Group.issue` is the way to start a communication: it records the communication in the
event log, and lets a test delay it or make it fail. Kernels that are GEMM and communication at once
(`comm.symmetric_memory`) record themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from megascale.comm.control import ControlChannel
from megascale.comm.lost_peer import lost_peer_error
from megascale.comm.p2p_collectives import P2PTransport
from megascale.comm.work import LostWork, TransportWork
from megascale.core.errors import LostPeerError
from megascale.device import Mark
from megascale.record.label import Label, LabelLike
from megascale.record.recorder import EventRecord, Recorder


class Transport(Protocol):
    """The implementation of a group's collectives. Tensors are contiguous; calls are asynchronous."""

    def all_reduce(self, tensor: Tensor, op: str) -> TransportWork: ...

    def all_gather(self, out: Tensor, part: Tensor) -> TransportWork: ...

    def reduce_scatter(self, out: Tensor, full: Tensor) -> TransportWork: ...


@dataclass(frozen=True)
class CommunicationFault:
    """An injected fault of a communication: the rank leaves it out, its data are lost on the way, `strike` is called
    after the rank has entered it, or `send_later` starts it in the place of the caller, who goes on.
    """

    left_out: bool = False
    lost: bool = False
    strike: Callable[[], None] = lambda: None
    send_later: Callable[[Callable[[], TransportWork]], TransportWork] | None = None


@dataclass
class Group:
    """The global `ranks` of a group, and this rank's `index` among them. The name begins with the parallelism axis.

    `process_group` is None for the group of all ranks, for a direction of the pipeline (every pair of ranks has its
    own process group, `comm.p2p`), and for a group of one rank, which sends nothing. `transport` is None for the last
    two. `p2p_transport` sends collectives piece by piece; None where communication cannot overlap with compute.
    `message_transport` sends messages of different sizes; None where `transport` is.
    `ring_problem`: why ranks of the same host send messages; "" with shared memory, and where it is out of place.
    `fault_hook` is called with operation and label before an issue, and with "wait" before a wait: tests delay it,
    raise, or return a fault of the communication.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None = None
    recorder: Recorder = field(default_factory=Recorder)
    transport: Transport | None = None
    p2p_transport: P2PTransport | None = None
    message_transport: P2PTransport | None = None
    ring_problem: str = ""
    fault_hook: Callable[[str, LabelLike], CommunicationFault | None] | None = None

    def __post_init__(self) -> None:
        if self.size > 1:
            self.recorder.log.open_group(self.name, self.ranks)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def axis(self) -> str:
        return self.name.partition(".")[0]

    @cached_property
    def control(self) -> ControlChannel:
        """The channel for control data among the group's ranks, outside of steps."""
        return ControlChannel(self.name, self.ranks, self.index, self.recorder.log)

    def issue(
        self,
        operation: str,
        label: LabelLike,
        nbytes: int,
        start: Callable[[], TransportWork],
        *,
        wait: bool,
        peer: int = -1,
    ) -> TrackedWork:
        """Issue a communication, and with `wait` wait for its end. `nbytes`: bytes of the full tensor."""
        fault = self.fault_hook(operation, label) if self.fault_hook is not None else None
        if fault is not None and fault.left_out:
            return TrackedWork(self, None, EventRecord(self.axis, operation, Label.from_part(label), 0.0), None)
        record = self.recorder.record_communication(self.axis, self.name, operation, label, nbytes, peer)
        if fault is not None:
            fault.strike()
            start = functools.partial(LostWork, record.issue) if fault.lost else start
            start = functools.partial(fault.send_later, start) if fault.send_later is not None else start
        try:
            started = start()
        except RuntimeError as error:
            if (lost := self.lost_peer_error(error, operation, label, peer)) is None:
                raise
            raise lost from error
        self.recorder.log.issued(record.handle)
        work = TrackedWork(self, started if wait else started.in_background(), record, start)
        if wait:
            work.wait(record.issue)
        elif self.recorder.timer.synchronous:
            self.recorder.record_wait(record, record.issue)  # the issuing thread computes: issuing is exposed time
        return work

    def lost_peer_error(
        self, error: RuntimeError, operation: str, label: LabelLike, peer: int = -1
    ) -> LostPeerError | None:
        """Return the error of a communication of this group as a `LostPeerError`; None for another kind of error."""
        peers = self.ranks[: self.index] + self.ranks[self.index + 1 :] if peer < 0 else (peer,)
        text = Label.from_part(label).text()
        what = f"{operation} {text!r}" if text else operation
        return lost_peer_error(error, what, self.name, self.ranks, peers)


class TrackedWork:
    """A communication in flight whose end and waits go into the event log. `owner` holds the tensors, and stays
    referenced until the communication is known to have ended: NCCL's works release tensors once any stream waits.
    """

    __slots__ = ("_group", "_owner", "_pending", "_record")

    def __init__(self, group: Group, pending: TransportWork | None, record: EventRecord, owner: object) -> None:
        self._group = group
        self._owner = owner
        self._pending = pending
        self._record = record

    def wait(self, since: Mark | None = None) -> None:
        """Wait for the end; later calls do nothing. `since`: start of compute's wait, if before this call."""
        if self._pending is None:
            return
        recorder = self._group.recorder
        start = recorder.mark() if since is None else since
        if self._group.fault_hook is not None:
            self._group.fault_hook("wait", self._record.label)
        recorder.log.begin_wait(self._record.handle)
        try:
            self._pending.wait()
        except RuntimeError as error:
            record = self._record
            if (lost := self._group.lost_peer_error(error, record.name, record.label, record.peer)) is None:
                raise
            raise lost from error
        self._close(recorder.record_wait(self._record, start), known=False)

    def is_completed(self) -> bool:
        """Return True if the communication is known to have ended, without waiting."""
        if self._pending is None:
            return True
        ended = self._pending.completed_at
        if ended is None or self._group.recorder.timer.seconds(ended) is None:
            return False
        self._close(ended, known=True)
        return True

    def _close(self, end: Mark, *, known: bool) -> None:
        assert self._pending is not None
        completed_at = self._pending.completed_at
        self._group.recorder.close(self._record, end if completed_at is None else completed_at, known=known)
        self._pending = self._owner = None


def single_rank_group(name: str, rank: int = 0) -> Group:
    """Return a group of this rank only."""
    return Group(name, (rank,), 0)
