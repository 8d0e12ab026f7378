"""Bandwidth of an all-reduce and of an all-to-all among the ranks of a group, by training's own transports, with every
element of the result checked: elements are whole numbers, whose sums are exact in any order.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megascale.bench.checks.rank_group import rank_group
from megascale.bench.timed_group import open_ranks, time_together
from megascale.comm.collectives import all_reduce
from megascale.comm.mesh import Mesh
from megascale.comm.p2p_collectives import MAX_MESSAGE_BYTES, P2PTransport
from megascale.comm.progress import work_wrapper
from megascale.comm.totals import max_over_job
from megascale.device import Device
from megascale.layout.topology import Topology
from megascale.operate.health.checks.result import CheckResult

CPU_BYTES, GPU_BYTES = 4 << 20, 256 << 20  # bytes of a rank's tensor

REPEATS = 10

VALUES = 64  # elements are whole numbers below: sums over 2^18 ranks are exact in fp32


def check_all_reduce(arguments: Mapping[str, Any]) -> CheckResult:
    """Sum a tensor over the ranks; the value is the bus bandwidth in bytes/s, as NCCL's tests define it."""
    with rank_group(arguments) as (rank, device):
        world = rank.world_size
        mesh, data = _open(rank.rank, world, device)
        moved = 2 * (world - 1) / world * data.nbytes
        rates = _rates(moved, functools.partial(all_reduce, mesh.tp, data.clone()), mesh, device)
        total = data.clone()
        all_reduce(mesh.tp, total)
        rest = (_data(data.numel(), other, device) for other in range(world % VALUES))
        expected = sum(rest, torch.full_like(data, world // VALUES * sum(range(VALUES))))
        return _result("all_reduce", rates, total, expected)


def check_all_to_all(arguments: Mapping[str, Any]) -> CheckResult:
    """Send a part of a tensor from every rank to every other rank, also on hosts whose ranks share memory; the value is
    the bytes/s that leave a rank.
    """
    with rank_group(arguments) as (rank, device):
        world = rank.world_size
        mesh, data = _open(rank.rank, world, device)
        received, group = torch.empty_like(data), mesh.tp
        parts, places = (list(tensor.view(world, -1).unbind()) for tensor in (data, received))
        places[rank.rank].copy_(parts[rank.rank])
        wrap_work = work_wrapper(group.name, group.recorder.timer, mesh.timeout)
        max_bytes = MAX_MESSAGE_BYTES if device.is_cpu else None
        transport = P2PTransport(group.process_group, group.ranks, group.index, wrap_work, max_bytes)
        start = functools.partial(transport.all_to_all, parts, places)
        exchange = functools.partial(group.issue, "all_to_all", "check", data.nbytes, start, wait=True)
        rates = _rates((world - 1) * parts[0].nbytes, exchange, mesh, device)
        expected = torch.cat([_data(data.numel(), other, device).view(world, -1)[rank.rank] for other in range(world)])
        return _result("all_to_all", rates, received, expected)


def _open(rank: int, world: int, device: Device) -> tuple[Mesh, Tensor]:
    size = (CPU_BYTES if device.is_cpu else GPU_BYTES) // 4
    data = _data(-(-size // world) * world, rank, device)
    return open_ranks(Topology(tp=world), rank, device), data


def _data(numel: int, rank: int, device: Device) -> Tensor:
    """Return the tensor of a rank, fp32 [numel]."""
    return torch.arange(numel, device=device.torch_device).add_(rank).remainder_(VALUES).float()


def _rates(nbytes: float, work: Callable[[], object], mesh: Mesh, device: Device) -> list[float]:
    """Time `work`, in which `nbytes` bytes travel; return the rates of the slowest rank in bytes/s."""
    seconds = time_together(work, mesh, device, REPEATS)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device.torch_device)
    max_over_job(mesh, slowest)
    return [nbytes / passed for passed in slowest.tolist()]


def _result(name: str, rates: list[float], found: Tensor, expected: Tensor) -> CheckResult:
    wrong = int((found != expected).sum())
    problem = f"{wrong} of {found.numel()} elements are wrong" if wrong else ""
    return CheckResult(name, value=statistics.median(rates), problem=problem, details={"best": max(rates)})
