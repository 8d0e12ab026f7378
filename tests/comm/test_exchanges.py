"""What ranks that share sequences send: parts to all ranks, and messages around a ring, by gloo."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megascale.core.rank import Rank
from tests.recorded_events import recorded_events
from tests.worlds import run_world


def exchange(rank: Rank) -> dict[str, tuple[int, int]]:
    """Exchange parts of several sizes and dtypes, two exchanges in flight; return calls and bytes by operation."""
    import torch

    from megascale.comm.collectives import all_to_all, send_on
    from megascale.comm.open_group import open_group
    from megascale.comm.p2p_collectives import MAX_MESSAGE_BYTES
    from megascale.record.recorder import Recorder

    world, recorder = rank.world_size, Recorder()
    recorder.step = 1
    group = open_group("cp.keys", range(world), rank.rank, recorder, messages=True)

    def full(sender: int, count: int, dtype: Any) -> Any:
        generator = torch.Generator().manual_seed(sender)
        return torch.randn(world, count, generator=generator, dtype=torch.float64).to(dtype)

    for count, dtype in itertools.product((1, 1000, MAX_MESSAGE_BYTES), (torch.bfloat16, torch.float64)):
        mine, out = full(rank.rank, count, dtype), torch.zeros(world, count, dtype=dtype)
        before = torch.zeros(count, dtype=dtype)
        first = all_to_all(group, out, mine, label="parts", wait=False)
        second = send_on(group, mine[0], before, (rank.rank + 1) % world, (rank.rank - 1) % world, label="part")
        second.wait()
        first.wait()
        assert torch.equal(out, torch.stack([full(sender, count, dtype)[rank.rank] for sender in range(world)]))
        assert torch.equal(before, full((rank.rank - 1) % world, count, dtype)[0])
    totals: dict[str, tuple[int, int]] = {}
    for event in recorded_events(recorder):
        calls, size = totals.get(event.name, (0, 0))
        totals[event.name] = calls + 1, size + event.bytes
    return totals


@pytest.mark.parametrize("world", [2, 3])
def test_parts_reach_their_ranks(world: int) -> None:
    nbytes = (1 + 1000 + (1 << 19)) * (2 + 8)
    for totals in run_world(world, exchange):
        assert totals == {"all_to_all": (6, world * nbytes), "send_on": (6, nbytes)}


def ring_of_two(rank: Rank) -> float:
    """The first two of three ranks exchange a part after an all-to-all of all; then all three send on."""
    import torch

    from megascale.comm.collectives import send_on
    from megascale.comm.open_group import open_group
    from megascale.record.recorder import Recorder

    group = open_group("cp.keys", range(3), rank.rank, Recorder(), messages=True)
    mine, first, second = torch.full((5,), float(rank.rank)), torch.zeros(5), torch.zeros(5)
    if rank.rank < 2:
        send_on(group, mine, first, 1 - rank.rank, 1 - rank.rank).wait()
    send_on(group, mine + 10, second, (rank.rank + 1) % 3, (rank.rank - 1) % 3).wait()
    return float(first[0] + second[0])


def test_ranks_of_a_group_form_smaller_rings() -> None:
    assert run_world(3, ring_of_two) == [1 + 12, 0 + 10, 0 + 11]


def test_a_single_rank_sends_nothing() -> None:
    import torch

    from megascale.comm.collectives import all_to_all
    from megascale.comm.group import single_rank_group

    out, full = torch.zeros(1, 3), torch.arange(3.0).view(1, 3)
    all_to_all(single_rank_group("cp.heads"), out, full).wait()
    assert torch.equal(out, full)
