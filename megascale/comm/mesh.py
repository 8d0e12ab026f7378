"""The topology with live groups. A `Mesh` is passed as an argument; there is no global one."""

from __future__ import annotations

from dataclasses import dataclass

from megascale.comm.group import Group, alone
from megascale.comm.open import open_group, open_transport
from megascale.comm.p2p import Channels
from megascale.layout.topology import Coord, Topology
from megascale.trace.recorder import Recorder

SLOT = 1 << 20
"""Bytes that a rank of a small CPU group puts out at once."""

SCALARS = 1 << 12
"""The same for the group of all ranks, which only ever sums a few numbers."""


@dataclass(frozen=True)
class Mesh:
    """This rank's place and the groups it belongs to.

    `dp` sums gradients: data and context parallel ranks. `tied` joins the first and the last pipeline stage where both
    hold the token embedding, and is this rank alone elsewhere. `world` is every rank of the job. `recorder` is the
    ledger of them all.
    """

    topology: Topology
    rank: int
    tp: Group
    dp: Group
    up: Group
    down: Group
    tied: Group
    world: Group
    recorder: Recorder
    channels: Channels

    @property
    def coord(self) -> Coord:
        return self.topology.coord(self.rank)

    @property
    def groups(self) -> tuple[Group, ...]:
        return (self.tp, self.dp, self.up, self.down, self.tied, self.world)


def open_mesh(topology: Topology, rank: int, *, tied: bool, recorder: Recorder | None = None) -> Mesh:
    """Open the groups that `rank` belongs to, and no others.

    Every rank opens its groups in the same order, so that groups of the same kind come up side by side and none waits
    for another kind. The one that only some ranks have comes last: torch names a group after its ranks and the number
    of groups that the process has, and members that count differently would wait for each other for ever.

    `tied`: the model's first and last stage share the token embedding.
    """
    recorder = recorder or Recorder()
    coord = topology.coord(rank)
    stages = topology.group(rank, "pp")
    ends = [stages[0], stages[-1]]
    share = tied and topology.pp > 1 and coord.pp in (0, topology.pp - 1)
    world = Group("world", tuple(range(topology.world)), rank, recorder=recorder)  # the default process group
    open_transport(world, SCALARS)
    tp = open_group("tp", topology.group(rank, "tp"), rank, recorder, slot_bytes=SLOT)
    dp = open_group("dp", topology.group(rank, "cp", "dp"), rank, recorder, slot_bytes=SLOT)
    up, down = open_group("pp.up", stages, rank, recorder), open_group("pp.down", stages, rank, recorder)
    ends_group = open_group("tied", ends, rank, recorder, slot_bytes=SLOT) if share else alone("tied", rank)
    return Mesh(topology, rank, tp, dp, up, down, ends_group, world, recorder, Channels(up, down))


def single() -> Mesh:
    """A world of one process."""
    tp, dp, up, down, tied, world = (alone(name) for name in ("tp", "dp", "pp.up", "pp.down", "tied", "world"))
    return Mesh(Topology(), 0, tp, dp, up, down, tied, world, Recorder(), Channels(up, down))
