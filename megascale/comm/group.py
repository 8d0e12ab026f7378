"""Ranks that communicate with each other, and a count of what they said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist


class Pending(Protocol):
    """Communication under way. After `wait` its output may be read and its input written, on this rank's stream."""

    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        return None


DONE: Pending = _Done()
"""Communication that needed none."""


@dataclass
class Traffic:
    """Calls, and bytes of the whole tensor concerned, of one operation."""

    calls: int = 0
    bytes: int = 0


@dataclass
class Group:
    """The ranks of one group, this rank's index among them, and the traffic so far by operation.

    `process_group` is None for a group of one, in which nothing is ever sent.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None = None
    direct: bool = False  # exchange point to point rather than by the backend's collectives, see `exchange`
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


DIRECT_LIMIT = 8
"""Largest group that exchanges directly: each rank sends a message to each other, so a ring is better for many."""


def open_group(name: str, ranks: Sequence[int], rank: int, backend: str) -> Group:
    """A group with its own communicator, made by its members alone: no other rank takes part or waits."""
    if len(ranks) == 1:
        return alone(name, rank)
    process_group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True, group_desc=name)
    direct = backend == "gloo" and len(ranks) <= DIRECT_LIMIT
    return Group(name, tuple(ranks), list(ranks).index(rank), process_group, direct)
