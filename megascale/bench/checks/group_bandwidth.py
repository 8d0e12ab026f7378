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
from megascale.bench.quartiles import intervals
from megascale.comm.collectives import all_reduce
from megascale.comm.mesh import Mesh, open_mesh
from megascale.comm.p2p_collectives import MAX_MESSAGE_BYTES, P2PTransport
from megascale.comm.progress import work_wrapper
from megascale.comm.totals import device_barrier, max_over_job
from megascale.core.rank import Rank
from megascale.device import Device
from megascale.layout.topology import Topology
from megascale.operate.health.checks.result import CheckResult
from megascale.record.recorder import Recorder

CPU_BYTES, GPU_BYTES = 4 << 20, 256 << 20
"""Bytes of a rank's tensor."""

REPEATS = 10

VALUES = 64
"""Elements are whole numbers below: sums over 2^18 ranks are exact in fp32."""


def check_all_reduce(arguments: Mapping[str, Any]) -> CheckResult:
    """Sum a tensor over the ranks; the value is the bus bandwidth in bytes/s, as NCCL's tests define it."""
    with rank_group(arguments) as (rank, device):
        world = rank.world_size
        mesh, data = _open(rank, device)
        seconds = _time(functools.partial(all_reduce, mesh.tp, data.clone()), mesh, device)
        total = data.clone()
        all_reduce(mesh.tp, total)
        rest = (_data(data.numel(), other, device) for other in range(world % VALUES))
        expected = sum(rest, torch.full_like(data, world // VALUES * sum(range(VALUES))))
        return _result("all_reduce", 2 * (world - 1) / world * data.nbytes, seconds, total, expected)


def check_all_to_all(arguments: Mapping[str, Any]) -> CheckResult:
    """Send a part of a tensor from every rank to every other rank; the value is the bytes/s that leave a rank."""
    with rank_group(arguments) as (rank, device):
        world = rank.world_size
        mesh, data = _open(rank, device)
        received = torch.empty_like(data)
        parts, places = (list(tensor.view(world, -1).unbind()) for tensor in (data, received))
        places[rank.rank].copy_(parts[rank.rank])
        seconds = _time(_exchange(mesh, device, parts, places), mesh, device)
        expected = torch.cat([_data(data.numel(), other, device).view(world, -1)[rank.rank] for other in range(world)])
        return _result("all_to_all", (world - 1) * parts[0].nbytes, seconds, received, expected)


def _exchange(mesh: Mesh, device: Device, outgoing: list[Tensor], incoming: list[Tensor]) -> Callable[[], object]:
    """Return a function that sends messages between all pairs, also on hosts whose ranks share memory."""
    group = mesh.tp
    wrap_work = work_wrapper(group.name, group.recorder.timer, mesh.timeout)
    max_bytes = MAX_MESSAGE_BYTES if device.is_cpu else None
    transport = P2PTransport(group.process_group, group.ranks, group.index, wrap_work, max_bytes)
    start = functools.partial(transport.all_to_all, outgoing, incoming)
    return lambda: group.issue("all_to_all", "check", sum(part.nbytes for part in outgoing), start, wait=True)


def _open(rank: Rank, device: Device) -> tuple[Mesh, Tensor]:
    """Open a group of all ranks; return the mesh and this rank's tensor."""
    recorder = Recorder(device.timer(), enabled=False)
    mesh = open_mesh(Topology(tp=rank.world_size), rank.rank, tied=False, recorder=recorder)
    size = (CPU_BYTES if device.is_cpu else GPU_BYTES) // 4
    return mesh, _data(-(-size // rank.world_size) * rank.world_size, rank.rank, device)


def _data(numel: int, rank: int, device: Device) -> Tensor:
    """Return the tensor of a rank, fp32 [numel]."""
    return torch.arange(numel, device=device.torch_device).add_(rank).remainder_(VALUES).float()


def _time(work: Callable[[], object], mesh: Mesh, device: Device) -> list[float]:
    """Time `work` REPEATS times in seconds; the slowest rank's."""
    seconds = []
    for repeat in range(REPEATS + 1):  # the first warms up
        device_barrier(mesh, device.torch_device)
        timer = device.timer()
        marks = [timer.mark()]
        work()
        marks.append(timer.mark())
        device.synchronize()
        if repeat:
            seconds += intervals(timer, marks)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device.torch_device)
    max_over_job(mesh, slowest)
    return slowest.tolist()


def _result(name: str, nbytes: float, seconds: list[float], found: Tensor, expected: Tensor) -> CheckResult:
    wrong = int((found != expected).sum())
    problem = f"{wrong} of {found.numel()} elements are wrong" if wrong else ""
    rates = [nbytes / passed for passed in seconds]
    return CheckResult(name, value=statistics.median(rates), problem=problem, details={"best": max(rates)})
