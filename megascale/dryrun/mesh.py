"""A rank's mesh in which nothing travels: every communication is named, goes into the ledger, and is done at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megascale.comm.group import Group
from megascale.comm.mesh import Mesh
from megascale.comm.p2p import Channels
from megascale.comm.pending import DONE, Pending
from megascale.layout.topology import AT_ONCE, DATA, Topology
from megascale.trace.recorder import Recorder


class Silent:
    """A transport whose collectives leave their tensors as they are."""

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        return DONE

    def all_gather(self, out: Tensor, part: Tensor) -> Pending:
        return DONE

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Pending:
        return DONE


class SilentExchange:
    """The same for collectives that travel piece by piece."""

    def round(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Pending:
        return DONE


class _Sent(Pending):
    """A message that is known to have arrived, so that nobody keeps it."""

    ended = 0.0

    def wait(self) -> None:
        return None


def _post(kind: str, group: Group, tensor: Tensor, peer: int) -> Pending:
    return _Sent()


def silent_mesh(topology: Topology, rank: int, recorder: Recorder, *, tied: bool, piecewise: bool) -> Mesh:
    """The mesh of `rank`, as `comm.mesh.open_mesh` would open it.

    `piecewise`: collectives travel while ranks compute, as between GPUs; not so through memory that CPUs share.
    """
    stages = topology.group(rank, "pp")
    share = tied and topology.pp > 1 and topology.coord(rank).pp in (0, topology.pp - 1)

    def group(name: str, ranks: Sequence[int]) -> Group:
        if len(ranks) == 1:
            return Group(name, (rank,), 0, recorder=recorder)
        exchange: Any = SilentExchange() if piecewise else None
        index = list(ranks).index(rank)
        return Group(name, tuple(ranks), index, None, recorder, Silent(), exchange)

    up, down = group("pp.up", stages), group("pp.down", stages)
    tp, dp = group("tp", topology.group(rank, "tp")), group("dp", topology.group(rank, *DATA))
    world = group("world", range(topology.world))
    sums: tuple[Group, ...] = (world,)
    if topology.world > AT_ONCE:
        sums = replace(dp, name="world.dp"), replace(tp, name="world.tp"), group("world.pp", stages)
    return Mesh(
        topology,
        rank,
        tp=tp,
        dp=dp,
        up=up,
        down=down,
        tied=group("tied", [stages[0], stages[-1]]) if share else group("tied", [rank]),
        world=world,
        sums=sums,
        recorder=recorder,
        channels=Channels(up, down, _post),
    )
