"""Ranks that communicate with each other, and a count of what they said."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from megascale.comm import shared
from megascale.comm.exchange import Exchange
from megascale.comm.pending import Pending


class Transport(Protocol):
    """Collectives that are not the backend's own. Tensors are contiguous."""

    def all_reduce(self, tensor: Tensor, op: str) -> Pending: ...

    def all_gather(self, out: Tensor, part: Tensor) -> Pending: ...

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Pending: ...


@dataclass
class Traffic:
    """Calls, and bytes of the whole tensor concerned, of one operation."""

    calls: int = 0
    bytes: int = 0


@dataclass
class Group:
    """The ranks of one group, this rank's index among them, and the traffic so far by operation.

    `process_group` is None for the group of all ranks, and for a group of one, in which nothing is ever sent.
    `transport` carries the collectives in place of the backend's own, see `open_transport`.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None = None
    transport: Transport | None = None
    traffic: defaultdict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))

    @property
    def size(self) -> int:
        return len(self.ranks)

    def count(self, operation: str, nbytes: int) -> None:
        """Take note of one call."""
        traffic = self.traffic[operation]
        traffic.calls += 1
        traffic.bytes += nbytes


def alone(name: str, rank: int = 0) -> Group:
    """A group of this rank only."""
    return Group(name, (rank,), 0)


def open_group(name: str, ranks: Sequence[int], rank: int, backend: str, *, slot_bytes: int = 0) -> Group:
    """A group with its own communicator, made by its members alone: no other rank takes part or waits.

    `slot_bytes`: on a CPU, the largest part of a collective that is sent at once; 0 for a group without collectives.
    """
    if len(ranks) == 1:
        return alone(name, rank)
    process_group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True, group_desc=name)
    group = Group(name, tuple(ranks), list(ranks).index(rank), process_group)
    if backend == "gloo" and slot_bytes:
        group.transport = open_transport(group, slot_bytes)
    return group


SMALL_GROUP = 8
"""Ranks up to which direct transports are used: in these each rank talks to each other, where gloo's ring has
neighbours.
"""


def open_transport(group: Group, slot_bytes: int) -> Transport | None:
    """How a small group on CPUs carries out collectives: through shared memory on one host, else by direct messages."""
    if not 1 < group.size <= SMALL_GROUP:
        return None
    places: list[tuple[str, int]] = [("", 0)] * group.size
    key = shared.host_key() if shared.usable() else str(group.index)
    dist.all_gather_object(places, (key, os.getpid()), group.process_group)
    if len({host for host, _ in places}) == 1 and (ring := _open_ring(group, [pid for _, pid in places], slot_bytes)):
        return ring
    return Exchange(group.process_group, group.ranks, group.index)


def _open_ring(group: Group, pids: list[int], slot_bytes: int) -> shared.SharedMemory | None:
    """Shared memory made by the group's first rank; None on every rank if there is not enough."""
    path = None
    if group.index == 0:
        try:
            path = shared.create(group.size, slot_bytes)
        except OSError:
            path = None
    box = [path]
    dist.broadcast_object_list(box, group.ranks[0], group.process_group)
    if box[0] is None:
        return None
    crowded = int(os.environ.get("LOCAL_WORLD_SIZE", group.size)) > len(os.sched_getaffinity(0))
    spin = 5e-6 if crowded else 100e-6  # seconds; with more ranks than cores, let the others run
    ring = shared.SharedMemory(box[0], group.size, group.index, pids, slot_bytes, spin)
    dist.barrier(group.process_group)
    if group.index == 0:
        box[0].unlink()
    return ring
