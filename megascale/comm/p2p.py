"""Messages between neighbouring pipeline stages.

Each ordered pair of ranks is a channel with a process group of its own: messages in one direction never wait for those
in the other, nor for another pair's, and arrive in the order in which they were sent. Shapes are known to both sides,
so nothing but the data travels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.comm.group import Group, Recorded
from megascale.comm.pending import Follow, Pending
from megascale.comm.progress import follower
from megascale.comm.timeout import Timeout
from megascale.core.label import What

Channel = tuple[int, int]
"""Sender and receiver."""

Post = Callable[[str, Group, Tensor, int], Pending]
"""Starts to 'send' a contiguous tensor to a rank of a group's, or to 'receive' one from it; the rank is its number in
the job.
"""


def rounds(ranks: int, *, around: bool) -> list[list[Channel]]:
    """The channels between neighbours in a pipeline of `ranks`, and if `around` between its last rank and its first.

    In each round a rank has one channel at most. Ranks that come to their channels round by round, each of which takes
    both of its ranks at once, never wait for each other in a circle.
    """
    last = ranks - 1
    even, odd = ([(low, low + 1) for low in range(start, last, 2)] for start in (0, 1))
    closing = [(0, last)] if around and last > 1 else []
    pairs = [even, odd + closing] if last % 2 else [even, odd, closing]
    ways = [turn for pair in pairs for turn in (pair, [(high, low) for low, high in pair])]
    return [turn for turn in ways if turn]


class Messages:
    """Messages of torch.distributed, as a `Post`. `groups`: by channel, in numbers of the job, those of this rank."""

    def __init__(self, groups: Mapping[Channel, dist.ProcessGroup], timeout: Timeout) -> None:
        self._groups = groups
        self._timeout = timeout
        self._follow: dict[Channel, Follow] = {}

    def __call__(self, kind: str, group: Group, tensor: Tensor, peer: int) -> Pending:
        own = group.ranks[group.index]
        call, channel = (dist.isend, (own, peer)) if kind == "send" else (dist.irecv, (peer, own))
        if channel not in self._follow:
            name = f"{group.name} {kind} {group.ranks.index(peer)}"
            self._follow[channel] = follower(name, group.recorder.timer, self._timeout)
        return self._follow[channel]([call(tensor, peer, group=self._groups[channel])], None)


class Channels:
    """This rank's channels to the other stages of its pipeline.

    Messages to a later rank of the pipeline are those of `up`, to an earlier one of `down`: the ledger counts each
    direction, and a test can delay it. `post` carries them.
    """

    def __init__(self, up: Group, down: Group, post: Post) -> None:
        self._up = up
        self._down = down
        self._post = post

    @property
    def rank(self) -> int:
        """This rank's index in its pipeline."""
        return self._up.index

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return self._up.size

    def connect(self, device: torch.device, *, around: bool) -> None:
        """Send a byte through each channel to and from a neighbour, and if `around` between the last rank and the
        first.

        NCCL connects two ranks at their first message, and each waits for the other. A receive that is posted ahead
        would be such a wait: ranks could wait in a circle. Here every rank comes to its channels round by round.
        """
        for turn in rounds(self.ranks, around=around):
            for sender, receiver in turn:
                if self.rank not in (sender, receiver):
                    continue
                byte = torch.zeros(1, dtype=torch.uint8, device=device)
                if self.rank == sender:
                    self.send(byte, receiver, what="connect").wait()
                else:
                    self.receive(byte, sender, what="connect").wait()

    def send(self, tensor: Tensor, to: int, *, what: What = "") -> Recorded:
        """Start sending a contiguous tensor to stage rank `to`. It may not change before the result is done."""
        return self._begin("send", self._up if to > self.rank else self._down, tensor, to, what)

    def receive(self, out: Tensor, source: int, *, what: What = "") -> Recorded:
        """Start receiving the next message of stage rank `source` into `out`."""
        return self._begin("receive", self._up if source < self.rank else self._down, out, source, what)

    def _begin(self, kind: str, group: Group, tensor: Tensor, other: int, what: What) -> Recorded:
        peer = group.ranks[other]
        start = functools.partial(self._post, kind, group, tensor, peer)
        return group.begin(kind, what, tensor.nbytes, start, wait=False, peer=peer)
