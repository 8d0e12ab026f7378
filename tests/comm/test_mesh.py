"""A mesh's groups: who opens which, in which order, under which name, and that messages travel in them."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.comm import mesh as mesh_module
from megascale.comm import open_group as open_module
from megascale.comm.collectives import all_reduce
from megascale.comm.mesh import Mesh, open_mesh, single_process_mesh
from megascale.core.rank import Rank
from megascale.layout.stages import looped
from megascale.layout.topology import Topology
from megascale.record.layout import CONTROL
from megascale.record.log_reader import LogReader
from tests.marks import only_quick
from tests.thread_world import simulate
from tests.worlds import run_world

shared = st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 2), (4, 2)])  # cp, and how many of them exchange heads
sizes = st.integers(1, 3), shared, st.integers(1, 3), st.integers(1, 7)
topologies = st.builds(lambda tp, cp, dp, pp: Topology(tp, cp[0], dp, pp, cp_heads=cp[1]), *sizes)
MOST_RANKS = pytest.mark.parametrize("most", only_quick([32, 252], 32))
"""Sizes of the largest job that is drawn; 252 are all."""


def drawn(most: int) -> st.SearchStrategy[Topology]:
    return topologies.filter(lambda topology: topology.world_size <= most)


def opened(topology: Topology, *, tied: bool, around: bool) -> list[list[tuple[str, tuple[int, ...]]]]:
    """By rank the names and members of the groups that it opens, in its order; nothing is sent."""
    found: list[list[tuple[str, tuple[int, ...]]]] = []

    def new_group(ranks: list[int], **how: Any) -> Any:
        assert how["use_local_synchronization"], "else every rank of the job would have to call"
        found[-1].append((how["group_desc"], tuple(sorted(ranks))))
        return SimpleNamespace()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_module.dist, "new_group", new_group)
        patch.setattr(open_module.dist, "get_backend", lambda: "gloo")
        patch.setattr(open_module.dist, "get_rank", lambda: 0)
        patch.setattr(mesh_module.Timeout, "register_group", lambda *_: None)
        patch.setattr(mesh_module, "_warn_without_rings", lambda mesh: None)
        for module in (mesh_module, open_module):
            patch.setattr(module, "open_transport", lambda *_: None)
        for rank in range(topology.world_size):
            found.append([])
            open_mesh(topology, rank, tied=tied, placement=looped(topology.pp, 2 if around else 1))
    return found


@MOST_RANKS
def test_every_rank_opens_one_group_of_each_kind(most: int) -> None:
    """torch names a group after its ranks and the number of groups that a process has, and with `device_id` NCCL splits
    it off the group of all ranks, which all must do at once: the groups of each turn are a partition of the job.
    """

    @settings(max_examples=60)
    @given(drawn(most), st.booleans(), st.booleans())
    def check(topology: Topology, tied: bool, around: bool) -> None:
        orders = opened(topology, tied=tied, around=around)
        assert len({len(order) for order in orders}) == 1
        for turn in zip(*orders, strict=True):
            members = defaultdict(set)
            for rank, (_, ranks) in enumerate(turn):
                assert rank in ranks
                members[ranks].add(rank)
            assert all(set(ranks) == there for ranks, there in members.items())

    check()


@MOST_RANKS
def test_each_channel_has_a_group_of_its_two_ranks(most: int) -> None:
    @settings(max_examples=60)
    @given(drawn(most), st.booleans())
    def check(topology: Topology, around: bool) -> None:
        for rank, order in enumerate(opened(topology, tied=False, around=around)):
            stages = topology.group(rank, "pp")
            own, p = stages.index(rank), len(stages)
            ways = [(a, a + 1) for a in range(p - 1)] + ([(p - 1, 0)] if around and p > 1 else [])
            pairs = {(stages[a], stages[b]) for a, b in ways if own in (a, b)}
            channels = {f"pp.{'up' if a < b else 'down'} {a}-{b}" for x, y in pairs for a, b in ((x, y), (y, x))}
            names = [name for name, _ in order if name.startswith("pp.")]
            assert len(names) == len(set(names)) and set(names) == channels

    check()


def rows(mesh: Mesh) -> set[str]:
    """The groups and directions of messages in the flight record of a mesh's rank."""
    record = LogReader(mesh.recorder.log.memory).state()
    return {key for key, state in record.groups.items() if state.kind != CONTROL}


def talk(rank: Rank, shapes: list[tuple[Topology, bool, bool]]) -> list[float]:
    """In one mesh after the other: each stage hears its neighbours' numbers, twice on each channel, all of which is
    posted before anything is waited for. Returns what the ends of each pipeline sum.
    """
    sums = []
    for topology, tied, around in shapes:
        mesh = open_mesh(topology, rank.rank, tied=tied, placement=looped(topology.pp, 2 if around else 1))
        expected = rows(mesh)
        channels, own, p = mesh.p2p, mesh.coord.pp, topology.pp
        neighbours = sorted({n % p for n in (own - 1, own + 1) if around or 0 <= n < p})
        received = [(torch.zeros(1), torch.zeros(1)) for _ in neighbours]
        waits = [channels.receive(r, n) for n, pair in zip(neighbours, received, strict=True) for r in pair]
        for count in (0.0, 0.5):
            waits += [channels.send(torch.tensor([own + count]), n) for n in neighbours]
        for wait in waits:
            wait.wait()
        assert [tuple(map(float, pair)) for pair in received] == [(n, n + 0.5) for n in neighbours]
        ends = torch.ones(1)
        all_reduce(mesh.tied, ends)
        for group in (mesh.tp, mesh.cp_heads, mesh.cp_keys, mesh.dp):
            all_reduce(group, torch.ones(1))
        assert rows(mesh) == expected, "the record knows what a rank takes part in before its first communication"
        sums.append(float(ends))
    return sums


def test_messages_travel_in_a_group_for_each_channel() -> None:
    """Also where only some ranks have a part in the groups of the mesh before."""
    shapes = [
        (Topology(dp=3, pp=2), True, True),
        (Topology(tp=2, pp=3), True, False),
        (Topology(tp=2, pp=3), True, True),
        (Topology(pp=6), False, True),
        (Topology(cp=6, cp_heads=2), False, False),
    ]
    told = run_world(6, talk, shapes)
    assert told == [[2, 2 if rank // 2 in (0, 2) else 1, 2 if rank // 2 in (0, 2) else 1, 1, 1] for rank in range(6)]


def test_a_group_by_its_axes() -> None:
    """A group opens at its first use, on all ranks at once; the order of the axes does not matter."""
    alone = single_process_mesh()
    assert alone.group("tp") is alone.tp and alone.group("cp", "dp") is alone.dp
    assert alone.group().ranks == (0,)

    def body(mesh: Mesh) -> tuple[float, float]:
        assert mesh.group("tp") is mesh.tp and mesh.group("dp", "cp") is mesh.dp
        sums = torch.zeros(2)
        for group, total in zip((mesh.group("cp"), mesh.group("dp", "tp")), sums.unbind(), strict=True):
            total += mesh.rank
            all_reduce(group, total)
            assert group is mesh.group(*group.name.split(".")[1].split("+")) and group in mesh.groups
        return float(sums[0]), float(sums[1])

    topology = Topology(tp=2, cp=2, dp=2)
    expected = [
        (sum(topology.group(rank, "cp")), sum(topology.group(rank, "tp", "dp"))) for rank in range(topology.world_size)
    ]
    assert simulate(topology, body) == expected
