"""Whether memory can be shared is asked of all ranks, and none begins to map unless all are there and on one host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.comm import symmetric
from megascale.comm.group import Group
from megascale.core.rank import Rank
from tests.worlds import run_world

symmetric_memory = pytest.importorskip("torch.distributed._symmetric_memory")

A_GPU: Any = SimpleNamespace(is_cpu=False, torch=torch.device("cpu"))


def _ask(rank: Rank, cannot_allocate: int, cannot_map: int, hosts: tuple[str, str] = ("a", "a")) -> tuple[bool, bool]:
    """Whether it is usable where one rank cannot allocate or map (-1: none), and whether this rank tried to map."""
    tried = []

    def empty(*size: int, **_: Any) -> torch.Tensor:
        if rank.rank == cannot_allocate:
            raise RuntimeError("no symmetric memory")
        return torch.empty(*size)

    def rendezvous(probe: torch.Tensor, group: dist.ProcessGroup) -> object:
        tried.append(probe)
        if rank.rank == cannot_map:
            raise RuntimeError("no peer access")
        return object()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "host_key", lambda: hosts[rank.rank])
        patch.setattr(symmetric_memory, "empty", empty)
        patch.setattr(symmetric_memory, "rendezvous", rendezvous)
        group = Group("tp", (0, 1), rank.rank, dist.new_group([0, 1]))
        return symmetric.usable(group, A_GPU), bool(tried)


def test_nobody_maps_unless_all_could_allocate() -> None:
    assert run_world(2, _ask, 1, -1) == [(False, False)] * 2


def test_nobody_maps_over_hosts() -> None:
    assert run_world(2, _ask, -1, -1, ("a", "b")) == [(False, False)] * 2


def test_all_agree_that_one_cannot_map() -> None:
    assert run_world(2, _ask, -1, 0) == [(False, True)] * 2


def test_it_is_usable_where_all_can() -> None:
    assert run_world(2, _ask, -1, -1) == [(True, True)] * 2
