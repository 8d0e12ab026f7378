"""A rank's mesh without peers: every communication is recorded and completes at once, without data transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megascale.comm.group import Group
from megascale.comm.mesh import Mesh
from megascale.comm.p2p import P2PCommunicator
from megascale.comm.work import COMPLETED, TransportWork
from megascale.layout.topology import DATA_AXES, MAX_FLAT_REDUCE_RANKS, Topology
from megascale.record.recorder import Recorder


class FakeTransport:
    """A transport whose collectives leave their tensors unchanged."""

    def all_reduce(self, tensor: Tensor, op: str) -> TransportWork:
        return COMPLETED

    def all_gather(self, out: Tensor, part: Tensor) -> TransportWork:
        return COMPLETED

    def reduce_scatter(self, out: Tensor, full: Tensor) -> TransportWork:
        return COMPLETED


class FakeP2PTransport:
    """A transport for collectives in pieces and messages, which leaves its tensors unchanged."""

    def send_on(self, out: Tensor, into: Tensor, to: int, source: int) -> TransportWork:
        return COMPLETED

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> TransportWork:
        return COMPLETED


class _FakeWork(TransportWork):
    """A point-to-point message that has completed, so the executor can release its tensor."""

    completed_at = 0.0

    def wait(self) -> None:
        return None


def _post(kind: str, group: Group, tensor: Tensor, peer: int) -> TransportWork:
    return _FakeWork()


def fake_mesh(topology: Topology, rank: int, recorder: Recorder, *, tied: bool, collectives_in_pieces: bool) -> Mesh:
    """Build the mesh of `rank` with the groups that `comm.mesh.open_mesh` opens.

    `collectives_in_pieces`: overlapped collectives are cut into pieces, as between GPUs.
    """
    stages = topology.group(rank, "pp")
    holds_tied_weight = tied and topology.pp > 1 and topology.coord(rank).pp in (0, topology.pp - 1)

    def group(name: str, ranks: Sequence[int], pieces: bool = collectives_in_pieces) -> Group:
        if len(ranks) == 1:
            return Group(name, (rank,), 0, recorder=recorder)
        messages: Any = FakeP2PTransport()
        index = list(ranks).index(rank)
        in_pieces = messages if pieces else None
        return Group(name, tuple(ranks), index, None, recorder, FakeTransport(), in_pieces, messages)

    up, down = group("pp.up", stages), group("pp.down", stages)
    tp, dp = group("tp", topology.group(rank, "tp")), group("dp", topology.group(rank, *DATA_AXES))
    heads, keys = (
        group(f"cp.{name}", ranks, True)
        for name, ranks in zip(("heads", "keys"), topology.cp_groups(rank), strict=True)
    )
    world = group("world", range(topology.world_size))
    reduction_groups: tuple[Group, ...] = (world,)
    if topology.world_size > MAX_FLAT_REDUCE_RANKS:
        reduction_groups = replace(dp, name="world.dp"), replace(tp, name="world.tp"), group("world.pp", stages)
    return Mesh(
        topology,
        rank,
        tp=tp,
        cp_heads=heads,
        cp_keys=keys,
        dp=dp,
        up=up,
        down=down,
        tied=group("tied", [stages[0], stages[-1]]) if holds_tied_weight else group("tied", [rank]),
        world=world,
        reduction_groups=reduction_groups,
        recorder=recorder,
        p2p=P2PCommunicator(up, down, _post),
    )
