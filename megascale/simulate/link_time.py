"""Seconds of communication between devices.

A ring of n ranks moves (n - 1) / n of the tensor through each rank in an all-gather or a reduce-scatter, twice that in
an all-reduce, in n - 1 successive messages, of which as many leave a node as there are nodes. An all-reduce between
nodes may take two trees of nodes instead, each for half of the tensor. NCCL chooses likewise (src/graph/tuning.cc).

A group's ranks are `stride` apart: `stride` groups side by side fill a run of ranks. Where a run leaves a node, its
groups share the node's network, at most one a device, also with those of a run that begins in the same node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megascale.simulate.profiles import Hardware

Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True)
class Route:
    """The link of one rank of a group: bytes/s each way, and seconds of a message. `network`: the group leaves a node;
    `ranks`: the group's ranks in a node, with links `inside` (bytes/s, seconds).
    """

    bandwidth: float
    latency: float
    network: bool
    ranks: int = 1
    inside: tuple[float, float] = (math.inf, 0.0)

    def collective(self, operation: Operation, size: float, ranks: int) -> float:
        """Seconds of a collective over `ranks`. `size`: bytes of an all-gather's result, or of a rank's summand."""
        if ranks == 1:
            return 0.0
        nodes, (inside, hop) = max(2, math.ceil(ranks / self.ranks)) if self.network else ranks, self.inside
        ring = (ranks - 1) / ranks * size / self.bandwidth + (nodes - 1) * self.latency + (ranks - nodes) * hop
        if operation != "all_reduce":
            return ring
        tree = (1 if nodes == 2 else 2) * size / self.bandwidth + 2 * math.ceil(math.log2(nodes)) * self.latency
        tree = max(tree, 2 * size / inside) + 2 * (self.ranks - 1) * hop
        return min(2 * ring, tree) if self.network else 2 * ring

    def message(self, size: float) -> float:
        """Seconds of `size` bytes from one rank to another."""
        return size / self.bandwidth + self.latency


def group_route(hardware: Hardware, size: int, stride: int, world: int, *, together: int = 1) -> Route:
    """The link of `size` ranks, `stride` apart in a job of `world`. Every `together` ranks share a node if they can."""
    node, network, attained = hardware.node, hardware.network, hardware.attained
    devices, run = _used(node.devices, world, together), size * stride
    inside = node.bandwidth * attained.link
    if devices % run == 0:
        return Route(inside, node.latency, network=False)
    groups = min(devices, stride if run % devices == 0 or run == world else 2 * stride)
    outside = network.bandwidth * attained.network / groups
    if run > devices * network.nodes:
        outside /= network.taper
    within = (devices // stride, (inside, node.latency)) if devices >= 2 * stride else ()
    return Route(min(inside, outside), network.latency, True, *within)


def neighbour_route(hardware: Hardware, stride: int, world: int, *, together: int = 1) -> Route:
    """The link to the rank `stride` further, when all ranks send at once; `together`: as in `group_route`."""
    node, network, attained = hardware.node, hardware.network, hardware.attained
    if world <= node.devices:
        link = node.message or node
        return Route(link.bandwidth * attained.link, link.latency, network=False)
    devices = _used(node.devices, world, together)
    outside, under = network.bandwidth * attained.network, devices * network.nodes  # under: ranks of one switch
    domains = [(devices, outside), (under, network.nodes * outside / network.taper)]
    share = min(shared / min(stride, ranks) for ranks, shared in domains if ranks < world)
    return Route(min(node.bandwidth * attained.link, share), network.latency, network=True)


def _used(devices: int, world: int, together: int) -> int:
    """Devices of a node in a job: equal shares on the fewest nodes, or full nodes where shares would part ranks."""
    nodes = -(-world // devices)
    even = world // nodes if world % nodes == 0 else devices
    whole = devices - devices % together
    return whole if even % together and whole * nodes >= world else even
