"""Warm-up: before the first step every group has run all its operations, and every channel has sent a message."""

from __future__ import annotations

from typing import Any

import pytest

from megascale.comm.mesh import Mesh
from megascale.comm.warm_up import warm_up
from megascale.core.rank import Rank
from megascale.device import detect_device
from megascale.layout.stages import looped
from megascale.layout.topology import Topology
from tests.recorded_events import recorded_events
from tests.runs import send_messages
from tests.thread_world import simulate
from tests.worlds import run_world

Shape = tuple[Topology, bool, bool, bool]
"""Topology, tied embeddings, wrap-around: the last stage sends to the first, and matrices that dp ranks exchange."""

QUICK: list[Shape] = [
    (Topology(tp=2, pp=2), True, True, True),
    (Topology(dp=2, pp=2), False, False, True),
    (Topology(dp=4), False, False, False),
    (Topology(pp=4), True, True, False),
    (Topology(tp=4), False, False, False),
    (Topology(cp=4, cp_heads=2), False, False, False),
]
ALL: list[Shape] = [
    (Topology(tp=2, pp=2, dp=2), True, True, True),
    (Topology(tp=2, pp=4), True, True, False),
    (Topology(dp=4, pp=2), False, False, True),
]
SIZES = (4, 1 << 16)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def warmed(rank: Rank, shapes: list[Shape], transport: str) -> list[Any]:
    """By shape: the event log after a forced warm-up, the expected events, and the number of groups opened."""
    import torch.distributed as dist

    from megascale.comm.mesh import open_mesh

    found = []
    for topology, tied, around, matrices in shapes:
        mesh = open_mesh(topology, rank.rank, tied=tied, placement=looped(topology.pp, 2 if around else 1))
        for group in mesh.groups:
            send_messages(group, backend=transport == "gloo")
        opened = len(dist.distributed_c10d._world.pg_map)
        links = looped(topology.pp, 2 if around else 1).links
        warm_up(mesh, detect_device(allow_gpu=False), links, SIZES, owners=[mesh.dp] if matrices else [])
        told = [(e.group, e.name, e.bytes, e.peer) for e in recorded_events(mesh.recorder)]
        wanted: list[Any] = []
        for group, sizes in (
            (mesh.tp, SIZES),
            (mesh.cp_keys, SIZES),
            (mesh.dp, SIZES),
            (mesh.tied, SIZES),
            (mesh.world, SIZES[:1]),
        ):
            if group.size > 1:  # a number of each rank at least
                bytes_of = [max(size, 4 * group.size) for size in sizes]
                wanted += [(group.name, operation, size, -1) for size in bytes_of for operation in COLLECTIVES]
        for group in (mesh.tp, mesh.cp_heads, mesh.cp_keys, *([mesh.dp] if matrices else [])):  # piece by piece
            if group.size > 1:
                wanted.append((group.name, "all_gather", 4 * group.size, -1))
        stages, own = topology.group(rank.rank, "pp"), mesh.coord.pp
        last = topology.pp - 1
        near = {own - 1, own + 1} & set(range(topology.pp)) | (
            {0: {last}, last: {0}}.get(own, set()) if around else set()
        )
        for other in near - {own}:
            ways = ("pp.up", "pp.down") if own < other else ("pp.down", "pp.up")
            wanted += [(way, kind, 1, stages[other]) for way, kind in zip(ways, ("send", "receive"), strict=True)]
        found.append((sorted(told), sorted(wanted), len(dist.distributed_c10d._world.pg_map) - opened))
    return found


def check(shapes: list[Shape], transport: str) -> None:
    for rank in run_world(shapes[0][0].world_size, warmed, shapes, transport):
        for told, wanted, opened in rank:
            assert told == wanted
            assert opened == 0


def test_each_group_and_each_channel_is_used() -> None:
    check(QUICK, "gloo")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "exchange"])
def test_each_group_and_each_channel_is_used_in_larger_worlds(transport: str) -> None:
    check(ALL, transport)


def of_a_cpu(rank: Rank) -> list[tuple[str, str]]:
    from megascale.comm.mesh import open_mesh

    mesh = open_mesh(Topology(pp=2), rank.rank, tied=True)
    warm_up(mesh, detect_device(allow_gpu=False), looped(2, 1).links)
    return sorted((event.group, event.name) for event in recorded_events(mesh.recorder))


def test_on_cpus_channels_alone_are_warmed_up() -> None:
    """gloo connects a group when it opens."""
    first, last = [("pp.down", "receive"), ("pp.up", "send")], [("pp.down", "send"), ("pp.up", "receive")]
    assert run_world(2, of_a_cpu) == [first, last]


def of_experts(mesh: Mesh) -> set[tuple[str, str]]:
    experts = [mesh.group("edp")]
    warm_up(mesh, detect_device(allow_gpu=False), (), SIZES, owners=[mesh.dp, *experts], further=experts)
    return {(event.group, event.name) for event in recorded_events(mesh.recorder)}


def test_ranks_of_experts_are_warmed_up() -> None:
    """Those with the same experts as those of dp; those with different ones as those that send pieces."""
    for told in simulate(Topology(dp=4, ep=2), of_experts):
        assert told >= {("edp", operation) for operation in COLLECTIVES}
        assert ("ep", "all_gather") in told and ("ep", "all_reduce") not in told
