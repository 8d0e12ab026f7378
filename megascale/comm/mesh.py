"""The device mesh: a topology with open groups. A `Mesh` is passed as an argument; there is no global mesh."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch.distributed as dist

from megascale.comm.group import Group
from megascale.comm.open_group import GroupOptions, open_group, open_process_group, open_transport
from megascale.comm.p2p import Channel, P2PCommunicator, ProcessGroupP2P, StartP2P, channel_rounds
from megascale.comm.timeout import Timeout
from megascale.config.launch import CommConfig, LaunchConfig, NcclConfig
from megascale.layout.stages import Placement, looped
from megascale.layout.topology import (
    AXES,
    DATA_AXES,
    EXPERT_AXES,
    INNER_AXES,
    MAX_FLAT_REDUCE_RANKS,
    REPLICATE,
    Coord,
    Topology,
)
from megascale.record.layout import RECEIVE, SEND
from megascale.record.recorder import Recorder

SLOT = 1 << 20  # bytes of a rank's slot in the shared-memory ring of a small CPU group
SCALAR_SLOT_BYTES = 1 << 12  # bytes of a slot in groups that only reduce a few scalars

PLACEHOLDER_GROUP = "none"
"""Name of the single-rank group that a rank opens while other ranks open a group without this rank."""


class GroupSpec(NamedTuple):
    """A group to open: global `ranks`, ascending. `slot_bytes`, `messages`: as in `comm.open_group.open_group`.
    `own`: with a communicator of its own; else it is the group of all ranks, or has no collectives.
    """

    name: str
    ranks: tuple[int, ...]
    slot_bytes: int = 0
    messages: bool = False
    own: bool = True


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinates and groups.

    - `tp`: the tensor-parallel ranks. `dp`: the data and context parallel ranks, which reduce gradients
    - `cp_heads`, `cp_keys`: the context-parallel ranks that exchange heads of attention, and keys and values
    - `up`, `down`: the pipeline's two directions
    - `tied`: the ranks of the first and the last stage where both hold the token embedding; elsewhere this rank only
    - `world`: all ranks
    - `reduction_groups`: job-wide reductions go over these groups in turn: `world` in a small job, else dp, tp and pp,
      under names of their own in the event log; `world` then serves control data only and has no communicator
    - `placement`: of the virtual stages
    - `recorder` is the event log and `timeout` the timeout of all groups
    - `open`, `by_axes`: how `group` opens a group, and the groups by their axes: along ep, whose ranks exchange the
      tokens of experts, from the start
    """

    topology: Topology
    rank: int
    placement: Placement
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
    timeout: Timeout
    open: Callable[[GroupSpec], Group]
    by_axes: dict[tuple[str, ...], Group]

    @property
    def coord(self) -> Coord:
        return self.topology.coord(self.rank)

    @property
    def has_last_stage(self) -> bool:
        return self.coord.pp == self.placement.ends[1]

    @property
    def groups(self) -> tuple[Group, ...]:
        axis_groups = (group for group in self.reduction_groups if group is not self.world)
        further = (group for group in self.by_axes.values() if group.size > 1 and group not in (self.tp, self.dp))
        named = self.tp, self.cp_heads, self.cp_keys, self.dp, self.up, self.down, self.tied, self.world
        return (*named, *axis_groups, *further)

    def group(self, *axes: str) -> Group:
        """Return this rank's group along `axes` of the topology; of this rank alone without axes. Along edp it is
        the group of other axes with the same ranks, where there is one; shards do not share that along ep.

        The first call for some axes opens the group. It is a collective of all ranks of the job, which open groups in
        the same order: torch names a group after its ranks and the number of groups that a process has.
        """
        key = tuple(axis for axis in (*AXES, *EXPERT_AXES, *INNER_AXES.values(), REPLICATE) if axis in axes)
        if key not in self.by_axes:
            ranks = tuple(self.topology.group(self.rank, *key))
            others = [group for axes, group in self.by_axes.items() if axes != ("ep",) or set(key) <= set(AXES)]
            same = [group for group in others if group.ranks == ranks and group.transport is not None]
            self.by_axes[key] = same[0] if same else self._open_along(key, ranks)
        return self.by_axes[key]

    def _open_along(self, key: tuple[str, ...], ranks: tuple[int, ...]) -> Group:
        name = f"{key[-1]}.{'+'.join(key)}" if key else "alone"  # "dp" alone is the name of `dp`
        name = name if set(key) <= set(AXES) else key[-1].replace("_", ".")
        group = self.open(GroupSpec(name, ranks, SLOT))
        if group.size > 1:
            self.recorder.log.expect(group.name)
        return group


def open_mesh(
    topology: Topology, rank: int, *, tied: bool, placement: Placement | None = None,
    recorder: Recorder | None = None, launch: LaunchConfig = LaunchConfig(), comm: CommConfig = CommConfig(),
    nccl: NcclConfig = NcclConfig(),
) -> Mesh:  # fmt: skip
    """Open the groups of `rank`. A collective of all ranks.

    Every rank opens the same kinds of groups in the same order, and a placeholder group of itself where a kind has no
    group with this rank. Groups of a kind then open in parallel, and no rank waits for a rank at another kind. torch
    needs the equal count: a group's name contains the number of groups in the process, and with a `device_id` NCCL
    splits every group from the group of all ranks, a collective.

    `tied`: the first and last stage share the token embedding. `placement`: of the virtual stages; default one on each
    rank.
    """
    placement = placement or looped(topology.pp, 1)
    recorder, options = recorder or Recorder(), GroupOptions(Timeout(launch, comm), nccl)
    channels: dict[Channel, dist.ProcessGroup] = {}

    def open_one(spec: GroupSpec) -> Group:
        if spec.own:
            slot_bytes, messages = spec.slot_bytes, spec.messages
            return open_group(spec.name, spec.ranks, rank, recorder, options, slot_bytes=slot_bytes, messages=messages)
        group = Group(spec.name, spec.ranks, spec.ranks.index(rank), recorder=recorder)
        if spec.slot_bytes and group.size > 1:
            options.timeout.register_group(None)
            open_transport(group, spec.slot_bytes, options.timeout)
        return group

    def open_p2p() -> StartP2P:
        channels.update(_open_channels(topology.group(rank, "pp"), rank, placement, options))
        return ProcessGroupP2P(channels, options.timeout)

    mesh = assemble_mesh(
        topology, rank, placement, open_one, open_p2p, tied=tied, recorder=recorder, timeout=options.timeout
    )
    first, last = placement.ends
    if tied and first != last and mesh.tied.size == 1:
        open_process_group(PLACEHOLDER_GROUP, [rank], options)
    _expect_communication(mesh, channels)
    if recorder.timer.synchronous:
        _warn_without_rings(mesh)
    return mesh


def assemble_mesh(
    topology: Topology, rank: int, placement: Placement, open_one: Callable[[GroupSpec], Group],
    open_p2p: Callable[[], StartP2P], *, tied: bool, recorder: Recorder, timeout: Timeout,
) -> Mesh:  # fmt: skip
    """Open the groups of `rank` by `open_one` and its messages by `open_p2p`, in the same order on all ranks."""

    def along(name: str, *axes: str, slot_bytes: int = SLOT) -> Group:
        return open_one(GroupSpec(name, tuple(topology.group(rank, *axes)), slot_bytes))

    is_small, everyone = topology.world_size <= MAX_FLAT_REDUCE_RANKS, tuple(range(topology.world_size))
    world = open_one(GroupSpec("world", everyone, SCALAR_SLOT_BYTES if is_small else 0, own=False))
    tp = along("tp", "tp")
    neighbours = zip(("cp.heads", "cp.keys"), topology.cp_groups(rank), strict=True)
    heads, keys = (open_one(GroupSpec(name, tuple(ranks), messages=True)) for name, ranks in neighbours)
    dp, experts = along("dp", *DATA_AXES), tuple(topology.group(rank, "ep"))
    by_axes: dict[tuple[str, ...], Group] = {("tp",): tp, DATA_AXES: dp}
    if topology.ep > 1:
        by_axes["ep",] = open_one(GroupSpec("ep", experts, messages=True))
    reductions: tuple[Group, ...] = (world,)
    if not is_small:
        pipeline = along("world.pp", "pp", slot_bytes=SCALAR_SLOT_BYTES)
        reductions = replace(dp, name="world.dp"), replace(tp, name="world.tp"), pipeline
    stages = tuple(topology.group(rank, "pp"))
    up, down = (open_one(GroupSpec(way, stages, own=False)) for way in ("pp.up", "pp.down"))
    p2p = P2PCommunicator(up, down, open_p2p())
    ends = tuple(sorted({stages[end] for end in placement.ends}))
    embedding = open_one(GroupSpec("tied", ends if tied and rank in ends else (rank,), SLOT))
    return Mesh(
        topology, rank, placement, tp, heads, keys, dp, up, down, embedding, world, reductions, recorder, p2p, timeout,
        open_one, by_axes,
    )  # fmt: skip


def _expect_communication(mesh: Mesh, channels: Iterable[Channel]) -> None:
    """Note in the log what this rank will take part in."""
    log = mesh.recorder.log
    named = mesh.tp, mesh.cp_heads, mesh.cp_keys, mesh.dp, mesh.tied, mesh.group("ep")
    for group in (*named, *mesh.reduction_groups):
        if group.size > 1:
            log.expect(group.name)
    for sender, receiver in channels:
        kind, peer = (SEND, receiver) if sender == mesh.rank else (RECEIVE, sender)
        log.expect((mesh.up if sender < receiver else mesh.down).name, kind, peer)


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
    return open_mesh(Topology(), 0, tied=False)
