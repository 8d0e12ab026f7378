"""Pipeline neighbours connect before the first step, in an order without deadlock."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.comm.group import Group
from megascale.comm.p2p import P2PCommunicator, ProcessGroupP2P, channel_rounds
from megascale.comm.timeout import Timeout
from megascale.comm.work import COMPLETED, TransportWork
from megascale.core.rank import Rank
from megascale.layout.stages import looped
from tests.runs import GPT, build_run, config_of, settings, traffic_of
from tests.worlds import run_world

Meeting = tuple[int, int]
"""Sender and receiver."""


class Recorded(P2PCommunicator):
    """A communicator that only records the channels of its messages, in order."""

    def __init__(self, rank: int, ranks: int) -> None:
        group = Group("pp", tuple(range(ranks)), rank)
        super().__init__(group, group, ProcessGroupP2P({}, Timeout()))
        self.meetings: list[Meeting] = []

    def send(self, tensor: torch.Tensor, to: int, *, label: str = "") -> TransportWork:
        self.meetings.append((self.rank, to))
        return COMPLETED

    def receive(self, out: torch.Tensor, source: int, *, label: str = "") -> TransportWork:
        self.meetings.append((source, self.rank))
        return COMPLETED


def meetings(ranks: int, around: bool) -> list[list[Meeting]]:
    """The connections of every rank, in the order that the rank makes them."""
    orders = []
    for rank in range(ranks):
        communicator = Recorded(rank, ranks)
        communicator.connect(torch.device("cpu"), looped(ranks, 2 if around else 1).links)
        orders.append(communicator.meetings)
    return orders


def stuck(orders: list[list[Meeting]]) -> list[Meeting]:
    """The connections that never complete if a connection blocks both ranks, as on NCCL."""
    queues = [deque(order) for order in orders]
    progress = True
    while progress:
        progress = False
        for queue in queues:
            while queue and all(queues[r] and queues[r][0] == queue[0] for r in queue[0]):
                sender, receiver = queue[0]
                queues[sender].popleft()
                queues[receiver].popleft()
                progress = True
    return [queue[0] for queue in queues if queue]


@given(st.integers(1, 40), st.booleans())
def test_every_pair_connects_both_ways_without_deadlock(ranks: int, around: bool) -> None:
    orders = meetings(ranks, around)
    assert not stuck(orders)
    pairs = {(low, low + 1) for low in range(ranks - 1)} | ({(0, ranks - 1)} if around and ranks > 1 else set())
    both = sorted([*pairs, *((high, low) for low, high in pairs)])
    assert sorted(meeting for order in orders for meeting in order) == sorted([*both, *both])


@given(st.integers(1, 40), st.booleans())
def test_a_rank_has_one_channel_at_most_in_each_round(ranks: int, around: bool) -> None:
    rounds = channel_rounds(looped(ranks, 2 if around else 1).links)
    for turn in rounds:
        busy = [rank for channel in turn for rank in channel]
        assert len(set(busy)) == len(busy)
    assert len(rounds) <= (6 if around and ranks % 2 else 4)


def test_a_deadlock_is_noticed() -> None:
    """Every rank receives from its left neighbour before sending to its right neighbour."""
    assert stuck([[(2, 0), (0, 1)], [(0, 1), (1, 2)], [(1, 2), (2, 0)]])


def bytes_said(rank: Rank, config: Any) -> list[tuple[int, int]]:
    said = traffic_of(build_run(rank, config), step=0)
    return [tuple(said[group].get(kind, (0, 0))[1] for kind in ("send", "receive")) for group in ("pp.up", "pp.down")]


def test_a_run_connects_before_its_first_step(tmp_path: Path) -> None:
    config = config_of(settings(GPT | {"num_layers": 6}, tmp_path, parallel__pp=3, parallel__vpp=2), tmp_path)
    assert run_world(3, bytes_said, config) == [
        [(2, 0), (0, 2)],  # to ranks 1 and 2, and from them
        [(1, 1), (1, 1)],
        [(0, 2), (2, 0)],
    ]
