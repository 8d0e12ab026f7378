"""Ranks that communicate with each other, and the door through which each of their communications goes.

The door names it, writes it into the ledger, and lets a test delay it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from megascale.comm.control import Control
from megascale.comm.exchange import Exchange
from megascale.comm.pending import Pending
from megascale.core.label import What
from megascale.device import Mark
from megascale.trace.recorder import Record, Recorder


class Transport(Protocol):
    """How a group carries out collectives. Tensors are contiguous; nothing has to be done when a call returns."""

    def all_reduce(self, tensor: Tensor, op: str) -> Pending: ...

    def all_gather(self, out: Tensor, part: Tensor) -> Pending: ...

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Pending: ...


@dataclass
class Group:
    """The ranks of one group and this rank's index among them. Its name begins with the axis of parallelism that it
    serves.

    `process_group` is None for the group of all ranks; for one way along a pipeline, whose messages have a group for
    each pair (`comm.p2p`); and for a group of one, in which nothing is ever sent; these have no `transport` either.
    `exchange`: what sends collectives piece by piece, None where nothing travels while this
    rank computes. `disturb` is called before each operation is issued and before it is waited for, so that a test can
    delay it or make it fail.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None = None
    recorder: Recorder = field(default_factory=Recorder)
    transport: Transport | None = None
    exchange: Exchange | None = None
    disturb: Callable[[str], None] | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def axis(self) -> str:
        return self.name.partition(".")[0]

    @cached_property
    def control(self) -> Control:
        """The channel for control data among the ranks, outside of steps."""
        return Control(self.name, self.ranks, self.index)

    def begin(
        self,
        operation: str,
        what: What,
        nbytes: int,
        start: Callable[[], Pending],
        *,
        wait: bool,
        peer: int = -1,
    ) -> Recorded:
        """Issue a communication, and wait for it if `wait`. `nbytes`: of the whole tensor concerned."""
        record = self.recorder.communication(self.axis, self.name, operation, what, nbytes, peer)
        if self.disturb is not None:
            self.disturb(operation)
        pending = start()
        begun = Recorded(self, pending if wait else pending.in_background(), record, start)
        if wait:
            begun.wait(record.issue)
        elif self.recorder.timer.host:
            self.recorder.waited(record, record.issue)  # compute has done nothing else meanwhile
        return begun


class Recorded:
    """A communication under way whose end and waits go into the ledger. Until it has been waited for, or is known to be
    done, it keeps `owner`, which holds the tensors: NCCL's works let go of them once any stream waits.
    """

    __slots__ = ("_group", "_owner", "_pending", "_record")

    def __init__(self, group: Group, pending: Pending, record: Record, owner: object) -> None:
        self._group = group
        self._owner = owner
        self._pending: Pending | None = pending
        self._record = record

    def wait(self, since: Mark | None = None) -> None:
        """Wait, once. `since`: when compute began to wait, if that was before this call."""
        if self._pending is None:
            return
        recorder = self._group.recorder
        start = recorder.mark() if since is None else since
        if self._group.disturb is not None:
            self._group.disturb("wait")
        self._pending.wait()
        self._close(recorder.waited(self._record, start))

    def done(self) -> bool:
        """Whether it is known to be done, without a wait. Then none is needed."""
        if self._pending is None:
            return True
        ended = self._pending.ended
        if ended is None or self._group.recorder.timer.seconds(ended) is None:
            return False
        self._close(ended)
        return True

    def _close(self, end: Mark) -> None:
        assert self._pending is not None
        known = self._pending.ended
        self._record.end = end if known is None else known
        self._record.closed = True
        self._pending = self._owner = None


def alone(name: str, rank: int = 0) -> Group:
    """A group of this rank only."""
    return Group(name, (rank,), 0)
