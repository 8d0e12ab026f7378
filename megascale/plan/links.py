"""Seconds of communication between devices.

A ring of n ranks moves (n - 1) / n of the whole through each rank in a gather or a reduce-scatter, and twice that in an
all-reduce, in n - 1 messages one after another. A group's ranks stand at equal distances in the job, and as many groups
as that distance lie between each other: together a run of ranks. Where a run does not lie in one node, its groups share
the node's way out, at most one for each of its devices; if a node has the end of one run and the beginning of another,
both runs' groups do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megascale.plan.profiles import Hardware

Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True)
class Route:
    """What one rank of a group has: bytes/s each way, and seconds of a message. `network`: it leaves the node."""

    bandwidth: float
    latency: float
    network: bool

    def collective(self, operation: Operation, whole: float, size: int) -> float:
        """Seconds of a collective of `size` ranks; `whole`: bytes of a gather's result, or of what others reduce."""
        if size == 1:
            return 0.0
        rounds = 2 if operation == "all_reduce" else 1
        messages = rounds * (size - 1)
        if self.network:  # large groups talk in trees, or in rings of rings
            messages = min(messages, rounds * 8 * math.ceil(math.log2(size)))
        return rounds * (size - 1) / size * whole / self.bandwidth + messages * self.latency

    def message(self, size: float) -> float:
        """Seconds of `size` bytes from one rank to another."""
        return size / self.bandwidth + self.latency


def group_route(hardware: Hardware, size: int, stride: int, world: int) -> Route:
    """Of a group of `size` ranks, `stride` apart in a job of `world`."""
    node, network, attained = hardware.node, hardware.network, hardware.attained
    devices, run = _used(node.devices, world), size * stride
    if devices % run == 0:
        return Route(node.bandwidth * attained.link, node.latency, network=False)
    groups = min(devices, stride if run % devices == 0 else 2 * stride)
    way_out = network.bandwidth * attained.network / groups
    if run > devices * network.nodes:
        way_out /= network.taper
    return Route(min(node.bandwidth * attained.link, way_out), network.latency, network=True)


def neighbour_route(hardware: Hardware, stride: int, world: int) -> Route:
    """Of messages to the rank `stride` further, which all ranks send at once."""
    node, network, attained = hardware.node, hardware.network, hardware.attained
    if world <= node.devices:
        way = node.message or node
        return Route(way.bandwidth * attained.link, way.latency, network=False)
    leaving = min(stride, _used(node.devices, world))  # ranks of a node whose neighbour is in another
    way_out = network.bandwidth * attained.network / leaving
    return Route(min(node.bandwidth * attained.link, way_out), network.latency, network=True)


def _used(devices: int, world: int) -> int:
    """Of a node, by a job that is spread evenly over as few nodes as hold it, or fills them where it cannot be."""
    nodes = -(-world // devices)
    return world // nodes if world % nodes == 0 else devices
