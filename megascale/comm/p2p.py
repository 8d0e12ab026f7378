"""Messages between neighbouring pipeline stages.

Each ordered pair of ranks is a channel of its own: messages in one direction never wait for those in the other, and
arrive in the order in which they were sent. Shapes are known to both sides, so nothing but the data travels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.comm.group import Group, Recorded
from megascale.comm.pending import Follow, Pending
from megascale.comm.progress import follower

Post = Callable[[str, Group, Tensor, int], Pending]
"""Starts to 'send' a contiguous tensor to a rank of a group's, or to 'receive' one from it; the rank is its number in
the job.
"""


class Messages:
    """Messages of torch.distributed, as a `Post`."""

    def __init__(self) -> None:
        self._follow: dict[tuple[str, str, int], Follow] = {}  # by direction, kind and the other rank

    def __call__(self, kind: str, group: Group, tensor: Tensor, peer: int) -> Pending:
        call = dist.isend if kind == "send" else dist.irecv
        channel = (group.name, kind, peer)
        if channel not in self._follow:
            self._follow[channel] = follower(f"{group.name} {kind} {group.ranks.index(peer)}", group.recorder.timer)
        return self._follow[channel]([call(tensor, peer, group=group.process_group)], None)


class Channels:
    """This rank's channels to the other stages of its pipeline.

    Messages to a later rank of the pipeline go through `up`, to an earlier one through `down`. With one communicator
    for each direction, two ranks that send to each other at once cannot block each other on NCCL. `post` carries them.
    """

    def __init__(self, up: Group, down: Group, post: Post | None = None) -> None:
        self._up = up
        self._down = down
        self._post = post or Messages()

    @property
    def rank(self) -> int:
        """This rank's index in its pipeline."""
        return self._up.index

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return self._up.size

    def connect(self, device: torch.device, *, around: bool) -> None:
        """Exchange a byte with each neighbour, and if `around` between the last rank and the first.

        NCCL connects two ranks at their first message, and each waits for the other. A receive that is posted ahead
        would be such a wait: ranks could wait in a circle. Here every rank comes to its pairs in the same order.
        """
        last = self.ranks - 1
        pairs = [(low, low + 1) for start in (0, 1) for low in range(start, last, 2)]
        if around and last > 1:
            pairs.append((0, last))
        for low, high in pairs:
            if self.rank not in (low, high):
                continue
            peer = high if self.rank == low else low
            for sender in (low, high):
                byte = torch.zeros(1, dtype=torch.uint8, device=device)
                (self.send if self.rank == sender else self.receive)(byte, peer, what="connect").wait()

    def send(self, tensor: Tensor, to: int, *, what: str = "") -> Recorded:
        """Start sending a contiguous tensor to stage rank `to`. It may not change before the result is done."""
        return self._begin("send", self._up if to > self.rank else self._down, tensor, to, what)

    def receive(self, out: Tensor, source: int, *, what: str = "") -> Recorded:
        """Start receiving the next message of stage rank `source` into `out`."""
        return self._begin("receive", self._up if source < self.rank else self._down, out, source, what)

    def _begin(self, kind: str, group: Group, tensor: Tensor, other: int, what: str) -> Recorded:
        peer = group.ranks[other]
        start = functools.partial(self._post, kind, group, tensor, peer)
        return group.begin(kind, what, tensor.nbytes, start, wait=False, peer=peer)
