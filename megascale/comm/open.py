"""Opening groups, each by its members alone, and choosing what carries their collectives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from megascale.comm import shared
from megascale.comm.backend import Backend
from megascale.comm.exchange import MESSAGE_BYTES, Exchange
from megascale.comm.group import Group, alone
from megascale.comm.nccl import options
from megascale.comm.progress import follower
from megascale.comm.timeout import Timeout
from megascale.config.nccl import NcclConfig
from megascale.core.process import usable_cores
from megascale.trace.recorder import Recorder

SMALL_GROUP = 8
"""Ranks up to which CPUs send each other direct messages: in these each rank talks to each other, where gloo's ring has
neighbours.
"""


@dataclass(frozen=True)
class Terms:
    """On which terms groups are opened: how long their operations wait for a rank, and what NCCL may take."""

    timeout: Timeout = field(default_factory=Timeout)
    nccl: NcclConfig = field(default_factory=NcclConfig)


def open_group(
    name: str,
    ranks: Sequence[int],
    rank: int,
    recorder: Recorder,
    terms: Terms | None = None,
    *,
    slot_bytes: int = 0,
) -> Group:
    """A group with its own communicator.

    `slot_bytes`: on CPUs, the largest part of a collective that is sent at once; 0 for a group without collectives.
    """
    if len(ranks) == 1:
        return alone(name, rank)
    terms = terms or Terms()
    process_group = open_process_group(name, ranks, terms)
    group = Group(name, tuple(ranks), list(ranks).index(rank), process_group, recorder)
    if slot_bytes:
        open_transport(group, slot_bytes, terms.timeout)
    return group


def open_process_group(name: str, ranks: Sequence[int], terms: Terms) -> dist.ProcessGroup:
    """What torch calls a group, made by its members alone: no other rank takes part or waits. Its name, the axis first,
    is what NCCL's log and flight recorder call it.
    """
    process_group = dist.new_group(
        list(ranks),
        timeout=terms.timeout.now,
        pg_options=options(dist.get_backend(), name.partition(".")[0], terms.nccl),
        use_local_synchronization=True,
        group_desc=name,
    )
    terms.timeout.govern_group(process_group)
    return process_group


def open_transport(group: Group, slot_bytes: int, timeout: Timeout) -> None:
    """Give a group its transport. On a GPU that is the backend. A small group on CPUs has shared memory if its ranks
    are on one host, else direct messages.
    """
    if group.size == 1:
        return
    timer = group.recorder.timer
    most = MESSAGE_BYTES if timer.host else None
    follow = follower(group.name, timer, timeout)
    group.exchange = Exchange(group.process_group, group.ranks, group.index, follow, most)
    group.transport = Backend(group.process_group, follower(group.name, timer))
    if timer.host and group.size <= SMALL_GROUP:
        group.transport = group.exchange
        if (ring := _open_ring(group, slot_bytes)) is not None:
            timeout.govern(ring.set_timeout)
            group.transport, group.exchange = ring, None  # its copies are made by the thread that computes


def _open_ring(group: Group, slot_bytes: int) -> shared.SharedMemory | None:
    """Shared memory made by the group's first rank; None on every rank if they do not share a host, or it is full."""
    key = shared.host_key() if shared.usable() else str(group.index)
    places = group.control.gather((key, os.getpid()), "shared memory")
    if len({host for host, _ in places}) > 1:
        return None
    path = None
    if group.index == 0:
        try:
            path = shared.create(group.size, slot_bytes)
        except OSError:
            path = None
    name = group.control.broadcast(path and str(path), "shared memory")
    if name is None:
        return None
    crowded = int(os.environ.get("LOCAL_WORLD_SIZE", group.size)) > usable_cores()
    spin = 5e-6 if crowded else 100e-6  # seconds; with more ranks than cores, let the others run
    pids = [pid for _, pid in places]
    ring = shared.SharedMemory(Path(name), group.size, group.index, pids, slot_bytes, spin)
    group.control.barrier("shared memory")
    if path is not None:
        path.unlink()
    return ring
