"""Pipeline neighbours are connected before the first step, in an order in which none waits for ever."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.comm.group import Group
from megascale.comm.p2p import Channels, Messages, rounds
from megascale.comm.pending import DONE, Pending
from megascale.comm.timeout import Timeout
from megascale.core.rank import Rank
from tests.runs import GPT, build_run, config_of, settings, traffic_of
from tests.worlds import run_world

Meeting = tuple[int, int]
"""Sender and receiver."""


class Recorded(Channels):
    """Channels that only note who meets whom."""

    def __init__(self, rank: int, ranks: int) -> None:
        group = Group("pp", tuple(range(ranks)), rank)
        super().__init__(group, group, Messages({}, Timeout()))
        self.meetings: list[Meeting] = []

    def send(self, tensor: torch.Tensor, to: int, *, what: str = "") -> Pending:
        self.meetings.append((self.rank, to))
        return DONE

    def receive(self, out: torch.Tensor, source: int, *, what: str = "") -> Pending:
        self.meetings.append((source, self.rank))
        return DONE


def meetings(ranks: int, around: bool) -> list[list[Meeting]]:
    """What each rank does, in its order."""
    found = []
    for rank in range(ranks):
        channels = Recorded(rank, ranks)
        channels.connect(torch.device("cpu"), around=around)
        found.append(channels.meetings)
    return found


def stuck(orders: list[list[Meeting]]) -> list[Meeting]:
    """Meetings that never take place if each needs both ranks at once, as on NCCL."""
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
def test_every_pair_meets_both_ways_and_none_waits_for_ever(ranks: int, around: bool) -> None:
    orders = meetings(ranks, around)
    assert not stuck(orders)
    pairs = {(low, low + 1) for low in range(ranks - 1)} | ({(0, ranks - 1)} if around and ranks > 1 else set())
    both = sorted([*pairs, *((high, low) for low, high in pairs)])
    assert sorted(meeting for order in orders for meeting in order) == sorted([*both, *both])


@given(st.integers(1, 40), st.booleans())
def test_a_rank_has_one_channel_at_most_in_each_round(ranks: int, around: bool) -> None:
    for turn in rounds(ranks, around=around):
        busy = [rank for channel in turn for rank in channel]
        assert len(set(busy)) == len(busy)
    assert len(rounds(ranks, around=around)) <= (6 if around and ranks % 2 else 4)


def test_a_circle_is_noticed() -> None:
    """If each rank received from its left before it sent to its right."""
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
