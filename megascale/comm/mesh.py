"""The topology with live groups. A `Mesh` is passed as an argument; there is no global one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from megascale.comm.group import Group, alone
from megascale.comm.open import Terms, open_group, open_process_group, open_transport
from megascale.comm.p2p import Channel, Channels, Messages, rounds
from megascale.comm.timeout import Timeout
from megascale.config.launch import LaunchConfig
from megascale.config.nccl import NcclConfig
from megascale.layout.topology import AT_ONCE, DATA, Coord, Topology
from megascale.trace.recorder import Recorder

SLOT = 1 << 20
"""Bytes that a rank of a small CPU group puts out at once."""

SCALARS = 1 << 12
"""The same for groups that only ever sum a few numbers."""

NO_PART = "none"
"""Name of a group of one rank, which it opens where others open one that it has no part in."""


@dataclass(frozen=True)
class Mesh:
    """This rank's place and the groups it belongs to.

    `dp` sums gradients: data and context parallel ranks. `tied` joins the first and the last pipeline stage where both
    hold the token embedding, and is this rank alone elsewhere. `world` is every rank of the job. What the job sums goes
    over `sums` in turn: in a small job `world`, else dp and tp, under names of their own in the ledger, and the
    pipeline; then `world` is for control data alone and has no communicator. `recorder` is the ledger of
    them all, `timeout` bounds their waits.
    """

    topology: Topology
    rank: int
    tp: Group
    dp: Group
    up: Group
    down: Group
    tied: Group
    world: Group
    sums: tuple[Group, ...]
    recorder: Recorder
    channels: Channels
    timeout: Timeout = field(default_factory=Timeout)

    @property
    def coord(self) -> Coord:
        return self.topology.coord(self.rank)

    @property
    def groups(self) -> tuple[Group, ...]:
        others = (group for group in self.sums if group is not self.world)
        return (self.tp, self.dp, self.up, self.down, self.tied, self.world, *others)

    def over(self, *axes: str) -> Group:
        """The group that communicates over `axes` of the topology.

        Raises: KeyError if none does
        """
        return {("tp",): self.tp, DATA: self.dp}[axes]


def open_mesh(
    topology: Topology,
    rank: int,
    *,
    tied: bool,
    around: bool = False,
    recorder: Recorder | None = None,
    launch: LaunchConfig = LaunchConfig(),
    nccl: NcclConfig = NcclConfig(),
) -> Mesh:
    """Open the groups that `rank` belongs to.

    Every rank opens one group after the other of the same kinds, and where it has no part in a kind, one of itself
    alone. So groups of a kind come up side by side, and none waits for another kind. Both are needed: torch names a
    group after its ranks and the number of groups that the process has, which must be equal on all members, and with
    `device_id` NCCL splits each group off that of all ranks, a collective of all.

    `tied`: the model's first and last stage share the token embedding. `around`: the last stage sends to the first one,
    which has another chunk of the model.
    """
    recorder, terms = recorder or Recorder(), Terms(Timeout(launch), nccl)
    stages = topology.group(rank, "pp")
    world = Group("world", tuple(range(topology.world)), rank, recorder=recorder)  # the default process group
    if 1 < topology.world <= AT_ONCE:
        terms.timeout.govern_group(None)
        open_transport(world, SCALARS, terms.timeout)
    tp = open_group("tp", topology.group(rank, "tp"), rank, recorder, terms, slot_bytes=SLOT)
    dp = open_group("dp", topology.group(rank, *DATA), rank, recorder, terms, slot_bytes=SLOT)
    sums: tuple[Group, ...] = (world,)
    if topology.world > AT_ONCE:
        pipeline = open_group("world.pp", stages, rank, recorder, terms, slot_bytes=SCALARS)
        sums = replace(dp, name="world.dp"), replace(tp, name="world.tp"), pipeline
    place = list(stages).index(rank)
    up, down = (Group(way, tuple(stages), place, recorder=recorder) for way in ("pp.up", "pp.down"))  # for the ledger
    messages = Messages(_open_channels(stages, rank, around, terms), terms.timeout)
    ends = alone("tied", rank)
    if tied and topology.pp > 1:
        if rank in (stages[0], stages[-1]):
            ends = open_group("tied", [stages[0], stages[-1]], rank, recorder, terms, slot_bytes=SLOT)
        else:
            open_process_group(NO_PART, [rank], terms)
    channels = Channels(up, down, messages)
    return Mesh(topology, rank, tp, dp, up, down, ends, world, sums, recorder, channels, terms.timeout)


def _open_channels(stages: Sequence[int], rank: int, around: bool, terms: Terms) -> dict[Channel, dist.ProcessGroup]:
    """A process group for each channel of this rank."""
    found = {}
    for turn in rounds(len(stages), around=around):
        channel = next(((stages[a], stages[b]) for a, b in turn if rank in (stages[a], stages[b])), None)
        if channel is None:
            open_process_group(NO_PART, [rank], terms)
            continue
        sender, receiver = channel
        way = "up" if sender < receiver else "down"
        found[channel] = open_process_group(f"pp.{way} {sender}-{receiver}", channel, terms)
    return found


def single() -> Mesh:
    """A world of one process."""
    tp, dp, up, down, tied, world = (alone(name) for name in ("tp", "dp", "pp.up", "pp.down", "tied", "world"))
    timeout = Timeout()
    channels = Channels(up, down, Messages({}, timeout))
    return Mesh(Topology(), 0, tp, dp, up, down, tied, world, (world,), Recorder(), channels, timeout)
