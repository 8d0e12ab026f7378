"""The device mesh: a topology with open groups. A `Mesh` is passed as an argument; there is no global mesh."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from megascale.comm.group import Group, single_rank_group
from megascale.comm.open_group import GroupOptions, open_group, open_process_group, open_transport
from megascale.comm.p2p import Channel, P2PCommunicator, ProcessGroupP2P, channel_rounds
from megascale.comm.timeout import Timeout
from megascale.config.launch import LaunchConfig
from megascale.config.nccl import NcclConfig
from megascale.core.flight_layout import RECEIVE, SEND
from megascale.layout.stages import Placement, looped
from megascale.layout.topology import DATA_AXES, MAX_FLAT_REDUCE_RANKS, Coord, Topology
from megascale.trace.recorder import Recorder

SLOT = 1 << 20
"""Bytes of a rank's slot in the shared-memory ring of a small CPU group."""

SCALAR_SLOT_BYTES = 1 << 12
"""Bytes of a slot in groups that only reduce a few scalars."""

PLACEHOLDER_GROUP = "none"
"""Name of the single-rank group that a rank opens while other ranks open a group without this rank."""


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinates and groups.

    - `tp`: the tensor-parallel ranks. `dp`: the data and context parallel ranks, which reduce gradients
    - `cp_heads`, `cp_keys`: the context-parallel ranks that exchange heads of attention, and keys and values
    - `up`, `down`: the pipeline's two directions
    - `tied`: first and last pipeline stage where both hold the token embedding; elsewhere this rank only
    - `world`: all ranks
    - `reduction_groups`: job-wide reductions go over these groups in turn: `world` in a small job, else dp, tp and pp,
      under names of their own in the event log; `world` then serves control data only and has no communicator
    - `recorder` is the event log and `timeout` the timeout of all groups
    """

    topology: Topology
    rank: int
    tp: Group
    cp_heads: Group
    cp_keys: Group
    dp: Group
    up: Group
    down: Group
    tied: Group
    world: Group
    reduction_groups: tuple[Group, ...]
    recorder: Recorder
    p2p: P2PCommunicator
    timeout: Timeout = field(default_factory=Timeout)

    @property
    def coord(self) -> Coord:
        return self.topology.coord(self.rank)

    @property
    def groups(self) -> tuple[Group, ...]:
        axis_groups = (group for group in self.reduction_groups if group is not self.world)
        return (self.tp, self.cp_heads, self.cp_keys, self.dp, self.up, self.down, self.tied, self.world, *axis_groups)

    def get_group(self, *axes: str) -> Group:
        """Return the group over these `axes` of the topology.

        Raises: KeyError for other axes.
        """
        return {("tp",): self.tp, DATA_AXES: self.dp}[axes]


def open_mesh(
    topology: Topology,
    rank: int,
    *,
    tied: bool,
    placement: Placement | None = None,
    recorder: Recorder | None = None,
    launch: LaunchConfig = LaunchConfig(),
    nccl: NcclConfig = NcclConfig(),
) -> Mesh:
    """Open the groups of `rank`. A collective of all ranks.

    Every rank opens the same kinds of groups in the same order, and a placeholder group of itself where a kind has no
    group with this rank. Groups of a kind then open in parallel, and no rank waits for a rank at another kind. torch
    needs the equal count: a group's name contains the number of groups in the process, and with a `device_id` NCCL
    splits every group from the group of all ranks, a collective.

    `tied`: the first and last stage share the token embedding. `placement`: of the virtual stages; default one on each
    rank.
    """
    placement = placement or looped(topology.pp, 1)
    recorder, options = recorder or Recorder(), GroupOptions(Timeout(launch), nccl)
    stages = topology.group(rank, "pp")
    world = Group("world", tuple(range(topology.world_size)), rank, recorder=recorder)  # the default process group
    if 1 < topology.world_size <= MAX_FLAT_REDUCE_RANKS:
        options.timeout.register_group(None)
        open_transport(world, SCALAR_SLOT_BYTES, options.timeout)
    tp = open_group("tp", topology.group(rank, "tp"), rank, recorder, options, slot_bytes=SLOT)
    neighbours = zip(("cp.heads", "cp.keys"), topology.cp_groups(rank), strict=True)
    heads, keys = (open_group(name, ranks, rank, recorder, options, messages=True) for name, ranks in neighbours)
    dp = open_group("dp", topology.group(rank, *DATA_AXES), rank, recorder, options, slot_bytes=SLOT)
    reductions: tuple[Group, ...] = (world,)
    if topology.world_size > MAX_FLAT_REDUCE_RANKS:
        pipeline = open_group("world.pp", stages, rank, recorder, options, slot_bytes=SCALAR_SLOT_BYTES)
        reductions = replace(dp, name="world.dp"), replace(tp, name="world.tp"), pipeline
    stage_rank = list(stages).index(rank)
    up, down = (Group(way, tuple(stages), stage_rank, recorder=recorder) for way in ("pp.up", "pp.down"))
    channels = _open_channels(stages, rank, placement, options)
    embedding = single_rank_group("tied", rank)
    if tied and topology.pp > 1:
        if rank in (stages[0], stages[-1]):
            embedding = open_group("tied", [stages[0], stages[-1]], rank, recorder, options, slot_bytes=SLOT)
        else:
            open_process_group(PLACEHOLDER_GROUP, [rank], options)
    p2p = P2PCommunicator(up, down, ProcessGroupP2P(channels, options.timeout))
    mesh = Mesh(
        topology, rank, tp, heads, keys, dp, up, down, embedding, world, reductions, recorder, p2p, options.timeout
    )
    _expect_communication(mesh, channels)
    if recorder.timer.synchronous:
        _warn_without_rings(mesh)
    return mesh


def _expect_communication(mesh: Mesh, channels: Iterable[Channel]) -> None:
    """Note in the flight record what this rank will take part in."""
    flight = mesh.recorder.flight
    for group in (mesh.tp, mesh.cp_heads, mesh.cp_keys, mesh.dp, mesh.tied, *mesh.reduction_groups):
        if group.size > 1:
            flight.expect(group.name)
    for sender, receiver in channels:
        kind, peer = (SEND, receiver) if sender == mesh.rank else (RECEIVE, sender)
        flight.expect((mesh.up if sender < receiver else mesh.down).name, kind, peer)


def _warn_without_rings(mesh: Mesh) -> None:
    """Say once for the job, on the first rank's stderr, that groups of one host have no shared memory."""
    problems = [(group.name, group.ring_problem) for group in mesh.groups if group.ring_problem]
    found = [problem for rank in mesh.world.control.gather(problems, "groups without a ring") or [] for problem in rank]
    if found:
        name, problem = found[0]
        text = f"WARNING: group {name} has no shared memory ({problem}): its ranks send messages, which is slower"
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def _open_channels(
    stages: Sequence[int], rank: int, placement: Placement, options: GroupOptions
) -> dict[Channel, dist.ProcessGroup]:
    """Open a process group for every channel of this rank."""
    process_groups = {}
    for pairs in channel_rounds(placement.links):
        channel = next(((stages[a], stages[b]) for a, b in pairs if rank in (stages[a], stages[b])), None)
        if channel is None:
            open_process_group(PLACEHOLDER_GROUP, [rank], options)
            continue
        sender, receiver = channel
        way = "up" if sender < receiver else "down"
        process_groups[channel] = open_process_group(f"pp.{way} {sender}-{receiver}", channel, options)
    return process_groups


def single_process_mesh() -> Mesh:
    """Return the mesh of a job of one process."""
    tp, heads, keys, dp, up, down, tied, world = (
        single_rank_group(name) for name in ("tp", "cp.heads", "cp.keys", "dp", "pp.up", "pp.down", "tied", "world")
    )
    timeout = Timeout()
    p2p = P2PCommunicator(up, down, ProcessGroupP2P({}, timeout))
    return Mesh(Topology(), 0, tp, heads, keys, dp, up, down, tied, world, (world,), Recorder(), p2p, timeout)
