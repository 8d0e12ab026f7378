"""Bandwidth and latency between ranks: collectives of tensor and data parallelism and point-to-point messages of
pipelines, through the transports of training on this host (`megascale bench links`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from megascale.bench.cost_fit import Measurement, fit_costs, rate_of_cost
from megascale.bench.quartiles import Quartiles
from megascale.bench.timed_group import open_ranks, time_together
from megascale.comm.collectives import all_gather, all_reduce, reduce_scatter
from megascale.comm.mesh import Mesh
from megascale.core.units import format_bytes
from megascale.device import Device
from megascale.layout.stages import looped
from megascale.layout.topology import Topology
from megascale.plan.simulate.link_time import Operation, Route

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
OPERATIONS = (*COLLECTIVES, "message")  # A message is timed as half of a ping-pong between two pipeline stages

FITS: dict[str, Sequence[str]] = {"collectives": COLLECTIVES, "messages": ("message",)}

SIZES = (4 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20)
"""Tensor sizes in bytes, from latency-bound to bandwidth-bound."""


@dataclass(frozen=True)
class LinkTiming:
    """Seconds of an operation among `ranks`. `bytes` is the size of the full tensor, as in `simulate.link_time`."""

    operation: str
    ranks: int
    bytes: int
    seconds: Quartiles

    @property
    def bus_bytes(self) -> float:
        """Bytes through every rank; divided by seconds, the bus bandwidth."""
        return self._link_time(1.0, 0.0)

    @property
    def latency_count(self) -> float:
        """Number of latencies in sequence, for example the hops of a ring."""
        return self._link_time(math.inf, 1.0)

    def _link_time(self, bandwidth: float, latency: float) -> float:
        """Predict the seconds with the planner's formulas."""
        route = Route(bandwidth, latency, network=False)
        if self.operation == "message":
            return route.message(self.bytes)
        return route.collective(cast(Operation, self.operation), self.bytes, self.ranks)


@dataclass(frozen=True)
class LinkCost:
    """Parameters of a planner's `Route`: bandwidth per direction in bytes/s, latency per message in seconds."""

    bandwidth: float
    latency: float


def measure_links(device: Device, rank: int, world: int, sizes: Sequence[int], repeats: int = 20) -> list[LinkTiming]:
    """Time every operation with every size among all ranks of an initialised job. A rank returns its own timings."""
    tensor, pipeline = (open_ranks(each, rank, device) for each in (Topology(tp=world), Topology(pp=world)))
    pipeline.p2p.connect(device.torch_device, looped(world, 1).links)
    timings = []
    for operation in OPERATIONS:
        for size in sizes:
            numel = max(1, size // 4 // world) * world
            work = _operation_fn(operation, tensor, pipeline, torch.zeros(numel, device=device.torch_device))
            halves = 2 if operation == "message" else 1
            seconds = [passed / halves for passed in time_together(work, tensor, device, repeats)]
            timings.append(LinkTiming(operation, world, 4 * numel, Quartiles.from_values(seconds)))
    return timings


def _operation_fn(operation: str, tensor: Mesh, pipeline: Mesh, full: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs an operation once."""
    group = tensor.tp
    part = full.view(group.size, -1)[group.index]
    if operation == "all_reduce":
        return lambda: all_reduce(group, full)
    if operation == "all_gather":
        return lambda: all_gather(group, full, part)
    if operation == "reduce_scatter":
        return lambda: reduce_scatter(group, part, full)
    channels, peer = pipeline.p2p, group.index ^ 1
    if peer >= group.size:  # the last of an odd number of ranks has no peer
        return lambda: None
    first = group.index < peer

    def ping_pong() -> None:
        if first:
            channels.send(full, peer).wait()
        channels.receive(full, peer).wait()
        if not first:
            channels.send(full, peer).wait()

    return ping_pong


def fit_link(timings: Sequence[LinkTiming], operations: Sequence[str]) -> LinkCost:
    """Fit bandwidth and latency to the timings of some operations. The lower quartile of every size is used, because
    other load on the machine only slows an operation down.
    """
    chosen = [timing for timing in timings if timing.operation in operations]
    samples = [Measurement((timing.latency_count, timing.bus_bytes), (timing.seconds.low,)) for timing in chosen]
    latency, byte = fit_costs(samples)
    lowest = min(timing.seconds.low / timing.latency_count for timing in chosen)
    return LinkCost(rate_of_cost(byte), latency or lowest)


def table(timings: Sequence[LinkTiming], device: Device) -> str:
    """Format the timings as a text table, with the fitted bandwidth and latency."""
    lines = [
        f"{timings[0].ranks} ranks on {device.name}, torch {torch.__version__}",
        f"{'operation':15} {'size':>10}  {'median us':>11} {'quartiles us':>22}  {'bus bandwidth':>14}",
    ]
    for timing in timings:
        s = timing.seconds
        quartiles = f"{s.low * 1e6:,.1f}..{s.high * 1e6:,.1f}"
        rate = f"{timing.bus_bytes / s.median / 1e9:.2f} GB/s"
        size = format_bytes(timing.bytes)
        lines.append(f"{timing.operation:15} {size:>10}  {s.median * 1e6:>11,.1f} {quartiles:>22}  {rate:>14}")
    for name, operations in FITS.items():
        cost = fit_link(timings, operations)
        lines.append(f"{name}: {cost.bandwidth / 1e9:.2f} GB/s, latency {cost.latency * 1e6:.1f} us per message")
    return "\n".join(lines)


def as_json(timings: Sequence[LinkTiming], device: Device) -> dict[str, Any]:
    """Return the timings, and the fitted bandwidth and latency, as JSON values."""
    return {
        "device": device.name,
        "ranks": timings[0].ranks,
        "torch": torch.__version__,
        "results": [asdict(timing) | {"travelled": timing.bus_bytes} for timing in timings],
        **{name: asdict(fit_link(timings, operations)) for name, operations in FITS.items()},
    }
