"""Times of a lowered schedule on GPUs whose hosts are far ahead: what an order of receives costs.

A send and its receive are kernels of a stream for each channel, an ordered pair of ranks. Either can run when the
compute actions before it in the rank's list, and the channel's earlier messages, are done; the message takes its time
from when both run; compute waits for the messages that it needs, and for no other.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lab.receive_orders import RECEIVES, Lists
from megascale.layout.stages import Placement
from megascale.operate.show.summary import union_length
from megascale.schedule.dependencies import neighbours
from megascale.schedule.ir import COMPUTE_KINDS, SERVED, Action

Interval = tuple[float, float]

Seconds = Mapping[tuple[int, Action], float]
"""The seconds of each compute action of each rank."""


class Times(NamedTuple):
    """The `last` rank's end; `beside`: share of compute beside a running send or receive; `open`: the most receives of
    a rank that run or wait for earlier ones.
    """

    last: float
    beside: float
    open: int


def times_of(lowered: Lists, placement: Placement, seconds: Seconds, message: float) -> Times:
    """Simulate a lowered schedule. `message`: seconds of a message."""
    ranks = [_Rank(number, deque(order), placement) for number, order in enumerate(lowered)]
    progress = True
    while progress:
        progress = False
        for rank in ranks:
            progress |= rank.run(seconds)
        for sender in ranks:
            for receiver in ranks:
                progress |= _carry(sender, receiver, message)
    assert not any(rank.left for rank in ranks), "the schedule does not end"
    lengths = ([union_length(each) for each in (r.computed, r.messages, r.computed + r.messages)] for r in ranks)
    computed, sent, either = map(sum, zip(*lengths, strict=True))
    most = max(_most_open(rank.receiving) for rank in ranks)
    return Times(max(rank.now for rank in ranks), (computed + sent - either) / computed, most)


def _carry(sender: _Rank, receiver: _Rank, message: float) -> bool:
    """Move the messages of a channel that both ends have posted."""
    sends, receives, moved = sender.sends[receiver.number], receiver.receives[sender.number], False
    while sends and receives:
        (sent, _), (posted, receive), free = sends.popleft(), receives.popleft(), sender.free[receiver.number]
        end = max(sent, posted, free) + message
        sender.messages.append((max(sent, free), end))
        receiver.messages.append((max(posted, free), end))
        receiver.receiving.append((posted, end))
        receiver.arrived[receive._replace(kind=SERVED[receive.kind])] = sender.free[receiver.number] = end
        moved = True
    return moved


def _most_open(intervals: Iterable[Interval]) -> int:
    edges = sorted((at, step) for interval in intervals for at, step in zip(interval, (1, -1), strict=True))
    return max(itertools.accumulate(step for _, step in edges), default=0)


@dataclass
class _Rank:
    """A rank. `left`: the rest of its list; `now`: the end of its posted compute; `sends` and `receives`: by the other
    rank, when the compute before them ends; `free`: by receiver, the end of a channel's last message.
    """

    number: int
    left: deque[Action]
    placement: Placement
    now: float = 0.0
    sends: defaultdict[int, deque[tuple[float, Action]]] = field(default_factory=lambda: defaultdict(deque))
    receives: defaultdict[int, deque[tuple[float, Action]]] = field(default_factory=lambda: defaultdict(deque))
    free: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    arrived: dict[Action, float] = field(default_factory=dict)
    computed: list[Interval] = field(default_factory=list)
    messages: list[Interval] = field(default_factory=list)
    receiving: list[Interval] = field(default_factory=list)

    def run(self, seconds: Seconds) -> bool:
        """Run the list up to an action whose message has not been sent; return True if anything ran."""
        before = len(self.left)
        while self.left:
            action = self.left[0]
            source, target = neighbours(action, self.number, self.placement)
            if action.kind in COMPUTE_KINDS:
                if source is not None and action not in self.arrived:
                    break
                start = max(self.now, self.arrived.get(action, 0.0))
                self.now = start + seconds[self.number, action]
                self.computed.append((start, self.now))
            elif action.kind in RECEIVES and source is not None:
                self.receives[self.placement.places[source][0]].append((self.now, action))
            elif target is not None:
                self.sends[self.placement.places[target][0]].append((self.now, action))
            self.left.popleft()
        return len(self.left) < before
