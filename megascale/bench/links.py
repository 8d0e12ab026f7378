"""How long what ranks send each other takes: the collectives of tensor and data parallelism, and the messages between
pipeline stages, through the transports that training chooses on this host (`megascale bench links`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from megascale.bench.fit import Sample, costs, rate
from megascale.bench.spread import Spread, between
from megascale.comm.collectives import all_gather, all_reduce, reduce_scatter
from megascale.comm.mesh import Mesh, open_mesh
from megascale.comm.totals import max_over_job, meet
from megascale.core.units import format_bytes
from megascale.device import Device
from megascale.layout.topology import Topology
from megascale.simulate.link_time import Operation, Route
from megascale.trace.recorder import Recorder

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
OPERATIONS = (*COLLECTIVES, "message")
"""A message goes from a pipeline stage to the next and comes back; half of the time is of one."""

SIZES = (4 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20)
"""Bytes: from a few numbers to a model's gradients."""

TIMING_S = 2e-3
"""Operations are timed in groups that take so long at least: more than a look at the clock, less than a turn of another
process on a busy core.
"""


@dataclass(frozen=True)
class Timed:
    """Seconds of an operation on `bytes` (of the whole tensor, as in `simulate.link_time`) among `ranks`."""

    operation: str
    ranks: int
    bytes: int
    seconds: Spread

    @property
    def travelled(self) -> float:
        """Bytes through each rank, of which the time is a bandwidth."""
        return self._ring(1.0, 0.0)

    @property
    def messages(self) -> float:
        """Of a rank, one after another."""
        return self._ring(math.inf, 1.0)

    def _ring(self, bandwidth: float, latency: float) -> float:
        """Seconds as the planner reckons them."""
        route = Route(bandwidth, latency, network=False)
        if self.operation == "message":
            return route.message(self.bytes)
        return route.collective(cast(Operation, self.operation), self.bytes, self.ranks)


@dataclass(frozen=True)
class Way:
    """What a `Route` of the planner has: bytes/s each way, and seconds of a message."""

    bandwidth: float
    latency: float


def measure(device: Device, rank: int, world: int, sizes: Sequence[int], repeats: int = 20) -> list[Timed]:
    """Every operation with every size among all ranks of a job that was brought together. Every rank has its own
    times.
    """
    tensor, pipeline = (_mesh(device, topology, rank) for topology in (Topology(tp=world), Topology(pp=world)))
    pipeline.channels.connect(device.torch, around=False)
    found = []
    for operation in OPERATIONS:
        for size in sizes:
            numbers = max(1, size // 4 // world) * world
            work = _work(operation, tensor, pipeline, torch.zeros(numbers, device=device.torch))
            halves = 2 if operation == "message" else 1
            seconds = [each / halves for each in _time(work, device, tensor, repeats)]
            found.append(Timed(operation, world, 4 * numbers, Spread.of(seconds)))
    return found


def _mesh(device: Device, topology: Topology, rank: int) -> Mesh:
    return open_mesh(topology, rank, tied=False, recorder=Recorder(device.timer(), on=False))


def _work(operation: str, tensor: Mesh, pipeline: Mesh, whole: torch.Tensor) -> Callable[[], object]:
    """Carries out an operation once."""
    group = tensor.tp
    part = whole.view(group.size, -1)[group.index]
    if operation == "all_reduce":
        return lambda: all_reduce(group, whole)
    if operation == "all_gather":
        return lambda: all_gather(group, whole, part)
    if operation == "reduce_scatter":
        return lambda: reduce_scatter(group, part, whole)
    channels, there = pipeline.channels, group.index ^ 1
    if there >= group.size:  # the last of an odd number has nobody to write to
        return lambda: None
    first = group.index < there

    def to_and_fro() -> None:
        if first:
            channels.send(whole, there).wait()
        channels.receive(whole, there).wait()
        if not first:
            channels.send(whole, there).wait()

    return to_and_fro


def _time(work: Callable[[], object], device: Device, mesh: Mesh, repeats: int) -> list[float]:
    """Seconds of one, `repeats` times."""
    seconds: list[float] = []
    group = 1
    for number in range(repeats + 2):  # the first tells how many make a group
        meet(mesh, device.torch)
        timer = device.timer()
        marks = [timer.mark()]
        for _ in range(group):
            work()
        marks.append(timer.mark())
        device.synchronize()
        (passed,) = between(timer, marks)
        if number == 1:
            once = torch.tensor([passed], dtype=torch.float64, device=device.torch)
            max_over_job(mesh, once)  # all do the same number
            group = max(1, math.ceil(TIMING_S / float(once)))
        elif number > 1:
            seconds.append(passed / group)
    return seconds


def way(found: Sequence[Timed], operations: Sequence[str]) -> Way:
    """What the planner needs to say how long these operations take. Of each size the lower quartile counts: whatever
    else the machine does can only slow it down.
    """
    chosen = [each for each in found if each.operation in operations]
    samples = [Sample((each.messages, each.travelled), (each.seconds.low,)) for each in chosen]
    latency, byte = costs(samples)
    least = min(each.seconds.low / each.messages for each in chosen)
    return Way(rate(byte), latency or least)


def table(found: Sequence[Timed], device: Device) -> str:
    """Times for people, and what they come to."""
    lines = [
        f"{found[0].ranks} ranks on {device.name}, torch {torch.__version__}",
        f"{'operation':15} {'size':>10}  {'median us':>11} {'quartiles us':>22}  {'through a rank':>14}",
    ]
    for each in found:
        s = each.seconds
        quartiles = f"{s.low * 1e6:,.1f}..{s.high * 1e6:,.1f}"
        rate = f"{each.travelled / s.median / 1e9:.2f} GB/s"
        size = format_bytes(each.bytes)
        lines.append(f"{each.operation:15} {size:>10}  {s.median * 1e6:>11,.1f} {quartiles:>22}  {rate:>14}")
    for name, operations in (("collectives", COLLECTIVES), ("messages", ("message",))):
        lines.append(f"{name}: {_words(way(found, operations))}")
    return "\n".join(lines)


def _words(way: Way) -> str:
    return f"{way.bandwidth / 1e9:.2f} GB/s and {way.latency * 1e6:.1f} us a message"


def as_json(found: Sequence[Timed], device: Device) -> dict[str, Any]:
    """Times as plain values."""
    ways = {"collectives": COLLECTIVES, "messages": ("message",)}
    return {
        "device": device.name,
        "ranks": found[0].ranks,
        "torch": torch.__version__,
        "results": [asdict(each) | {"travelled": each.travelled} for each in found],
        **{name: asdict(way(found, operations)) for name, operations in ways.items()},
    }
