"""Point-to-point messages between pipeline stages.

An ordered pair of ranks (sender, receiver) is a channel with its own process group: messages of a channel arrive in the
order of their sends, and never wait for messages of the opposite direction or of another pair. Both sides know the
shapes; only data is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.comm.group import Group, TrackedWork
from megascale.comm.progress import work_wrapper
from megascale.comm.timeout import Timeout
from megascale.comm.work import TransportWork, WrapWork
from megascale.layout.stages import Link
from megascale.record.label import LabelLike

Channel = tuple[int, int]
"""Sender and receiver."""

StartP2P = Callable[[str, Group, Tensor, int], TransportWork]
"""Function (kind, group, tensor, peer): start to "send" a contiguous tensor to global rank `peer`, or to "receive"."""


def channel_rounds(links: Iterable[Link]) -> list[list[Channel]]:
    """Return the channels of linked ranks, both ways, in rounds.

    A rank has at most one channel in a round, so ranks that open or connect channels round by round cannot deadlock:

        4 ranks in a ring:   (0,1) (2,3) | (1,0) (3,2) | (0,3) (1,2) | (3,0) (2,1)
    """
    rounds = list[list[Link]]()
    for link in sorted(links):
        free = (pairs for pairs in rounds if not any(set(link) & set(pair) for pair in pairs))
        pairs = next(free, None)
        if pairs is None:
            rounds.append(pairs := [])
        pairs.append(link)
    return [channels for pairs in rounds for channels in (pairs, [(high, low) for low, high in pairs])]


class ProcessGroupP2P:
    """A `StartP2P` on torch.distributed. `groups`: the process groups of this rank's channels, by global ranks."""

    def __init__(self, groups: Mapping[Channel, dist.ProcessGroup], timeout: Timeout) -> None:
        self._groups = groups
        self._timeout = timeout
        self._wrap_work: dict[Channel, WrapWork] = {}

    def __call__(self, kind: str, group: Group, tensor: Tensor, peer: int) -> TransportWork:
        rank = group.ranks[group.index]
        call, channel = (dist.isend, (rank, peer)) if kind == "send" else (dist.irecv, (peer, rank))
        if channel not in self._wrap_work:
            name = f"{group.name} {kind} {group.ranks.index(peer)}"
            self._wrap_work[channel] = work_wrapper(name, group.recorder.timer, self._timeout)
        return self._wrap_work[channel]([call(tensor, peer, group=self._groups[channel])], None)


class P2PCommunicator:
    """Sends and receives of this rank with the other ranks of its pipeline.

    Messages to a later rank belong to group `up`, to an earlier rank to `down`: the event log counts the two directions
    apart, and a test can delay either. `start_p2p` sends and receives.
    """

    def __init__(self, up: Group, down: Group, start_p2p: StartP2P) -> None:
        self._up = up
        self._down = down
        self._start_p2p = start_p2p

    @property
    def rank(self) -> int:
        """Index of this rank in its pipeline."""
        return self._up.index

    @property
    def size(self) -> int:
        """Number of ranks of the pipeline."""
        return self._up.size

    def connect(self, device: torch.device, links: Iterable[Link]) -> None:
        """Send a byte through every channel of this rank, round by round (`channel_rounds`).

        NCCL connects two ranks at their first message, and both wait: in rounds, many pairs connect at a time.
        """
        for channels in channel_rounds(links):
            for sender, receiver in channels:
                if self.rank not in (sender, receiver):
                    continue
                byte = torch.zeros(1, dtype=torch.uint8, device=device)
                if self.rank == sender:
                    self.send(byte, receiver, label="connect").wait()
                else:
                    self.receive(byte, sender, label="connect").wait()

    def send(self, tensor: Tensor, to: int, *, label: LabelLike = "") -> TrackedWork:
        """Start sending a contiguous tensor to pipeline rank `to`. Do not write `tensor` before the work is done."""
        return self._issue("send", self._up if to > self.rank else self._down, tensor, to, label)

    def receive(self, out: Tensor, source: int, *, label: LabelLike = "") -> TrackedWork:
        """Start receiving the next message of pipeline rank `source` into `out`."""
        return self._issue("receive", self._up if source < self.rank else self._down, out, source, label)

    def _issue(self, kind: str, group: Group, tensor: Tensor, pipeline_rank: int, label: LabelLike) -> TrackedWork:
        peer = group.ranks[pipeline_rank]
        start = functools.partial(self._start_p2p, kind, group, tensor, peer)
        return group.issue(kind, label, tensor.nbytes, start, wait=False, peer=peer)
