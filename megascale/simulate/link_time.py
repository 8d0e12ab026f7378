"""Seconds of communication between devices.

A ring of n ranks moves (n - 1) / n of the tensor through each rank in an all-gather or a reduce-scatter, and twice that
in an all-reduce, in n - 1 messages one after another, of which as many leave a node as there are nodes. An all-reduce
between nodes takes two trees of nodes where that is sooner, each for half of the tensor: with two nodes it crosses the
network once each way. NCCL chooses by such a model of its times (src/graph/tuning.cc).

A group's ranks are `stride` apart, and `stride` such groups lie side by side: together they are a run of ranks. Where a
run leaves a node, its groups share the node's network, at most one for each of its devices; a node that has the end of
one run and the beginning of another shares it among both runs' groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megascale.simulate.profiles import Hardware

Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True)
class Route:
    """The links of one rank of a group: bytes/s each way, and seconds of a message. `network`: the group leaves a node;
    `ranks`: it has so many in a node, with links `inside` (bytes/s, seconds).
    """

    bandwidth: float
    latency: float
    network: bool
    ranks: int = 1
    inside: tuple[float, float] = (math.inf, 0.0)

    def collective(self, operation: Operation, size: float, ranks: int) -> float:
        """Seconds of a collective. `size`: bytes of an all-gather's result, or of what each rank reduces."""
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
    """The links of a group of `size` ranks, `stride` apart in a job of `world`, of which every `together` neighbours
    are to lie in one node if they can.
    """
    node, network, attained = hardware.node, hardware.network, hardware.attained
    devices, run = _used(node.devices, world, together), size * stride
    inside = node.bandwidth * attained.link
    if devices % run == 0:
        return Route(inside, node.latency, network=False)
    groups = min(devices, stride if run % devices == 0 or run == world else 2 * stride)
    outside = network.bandwidth * attained.network / groups
    if run > devices * network.nodes:
        outside /= network.taper
    if devices < 2 * stride:
        return Route(min(inside, outside), network.latency, network=True)
    return Route(min(inside, outside), network.latency, True, devices // stride, (inside, node.latency))


def neighbour_route(hardware: Hardware, stride: int, world: int, *, together: int = 1) -> Route:
    """The link to the rank `stride` further, to which all ranks send at once; `together` as in `group_route`."""
    node, network, attained = hardware.node, hardware.network, hardware.attained
    if world <= node.devices:
        link = node.message or node
        return Route(link.bandwidth * attained.link, link.latency, network=False)
    devices = _used(node.devices, world, together)
    outside = network.bandwidth * attained.network
    each = outside / min(stride, devices)  # ranks of a node whose neighbour is in another
    if world > devices * network.nodes:  # likewise for the nodes under one switch
        above = network.nodes * outside / network.taper
        each = min(each, above / min(stride, devices * network.nodes))
    return Route(min(node.bandwidth * attained.link, each), network.latency, network=True)


def _used(devices: int, world: int, together: int) -> int:
    """Devices of a node that a job uses: it is spread evenly over as few nodes as hold it, or fills them where that
    would part ranks that are to lie together.
    """
    nodes = -(-world // devices)
    even = world // nodes if world % nodes == 0 else devices
    whole = devices - devices % together
    return whole if even % together and whole * nodes >= world else even
