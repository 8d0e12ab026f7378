"""Seconds of communication between devices.

A ring of n ranks moves (n - 1) / n of the whole through each rank in a gather or a reduce-scatter, and twice that in an
all-reduce, in n - 1 messages one after another, of which as many leave a node as there are nodes. Where that is sooner
an all-reduce between nodes takes two trees, each for half of it; all as in NCCL's own model of its times, which chooses
by it (src/graph/tuning.cc).

A group's ranks stand at equal distances in the job, and as many groups as that distance lie between each other:
together a run of ranks. Where a run does not lie in one node, its groups share the node's way out, at most one for each
of its devices; if a node has the end of one run and the beginning of another, both runs' groups do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megascale.plan.profiles import Hardware

Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True)
class Route:
    """What one rank of a group has: bytes/s each way, and seconds of a message. `network`: it leaves the node, in which
    the group has as many as `ranks`, with a route `inside`.
    """

    bandwidth: float
    latency: float
    network: bool
    ranks: int = 1
    inside: Route | None = None

    def collective(self, operation: Operation, whole: float, size: int) -> float:
        """Seconds of a collective of `size` ranks; `whole`: bytes of a gather's result, or of what others reduce."""
        if size == 1:
            return 0.0
        ring = (size - 1) / size * whole / self.bandwidth + self._around(size)
        if operation != "all_reduce":
            return ring
        return min(2 * ring, self._trees(whole, size)) if self.network else 2 * ring

    def broadcasts(self, whole: float, size: int, count: int) -> float:
        """Seconds in which `count` of the ranks have sent their parts of `whole` bytes to all, one after another."""
        return whole / self.bandwidth + count * self._around(size) if size > 1 else 0.0

    def message(self, size: float) -> float:
        """Seconds of `size` bytes from one rank to another."""
        return size / self.bandwidth + self.latency

    def _around(self, size: int) -> float:
        """Seconds of an empty message around the ring, which leaves each node once."""
        if not self.inside:
            return (size - 1) * self.latency
        nodes = self._nodes(size)
        return (nodes - 1) * self.latency + (size - nodes) * self.inside.latency

    def _trees(self, whole: float, size: int) -> float:
        """Of an all-reduce up two trees of nodes and down again, of which one's leaves are the other's forks, so that a
        node sends all of it twice, if not two nodes have one edge a tree; inside a node along a chain.
        """
        nodes = self._nodes(size)
        seconds = (1 if nodes == 2 else 2) * whole / self.bandwidth + 2 * math.ceil(math.log2(nodes)) * self.latency
        if not self.inside:
            return seconds
        within = 2 * whole / self.inside.bandwidth
        return max(seconds, within) + 2 * (self.ranks - 1) * self.inside.latency

    def _nodes(self, size: int) -> int:
        return max(2, math.ceil(size / self.ranks))


def group_route(hardware: Hardware, size: int, stride: int, world: int, *, together: int = 1) -> Route:
    """Of a group of `size` ranks, `stride` apart in a job of `world`, of which as many as `together` are to lie in one
    node if they can.
    """
    node, network, attained = hardware.node, hardware.network, hardware.attained
    devices, run = _used(node.devices, world, together), size * stride
    inside = Route(node.bandwidth * attained.link, node.latency, network=False)
    if devices % run == 0:
        return inside
    groups = min(devices, stride if run % devices == 0 or run == world else 2 * stride)
    way_out = network.bandwidth * attained.network / groups
    if run > devices * network.nodes:
        way_out /= network.taper
    ranks = max(1, devices // stride)
    bandwidth = min(inside.bandwidth, way_out)
    return Route(bandwidth, network.latency, network=True, ranks=ranks, inside=inside if ranks > 1 else None)


def neighbour_route(hardware: Hardware, stride: int, world: int, *, together: int = 1) -> Route:
    """Of messages to the rank `stride` further, which all ranks send at once. `together`: as in `group_route`."""
    node, network, attained = hardware.node, hardware.network, hardware.attained
    if world <= node.devices:
        way = node.message or node
        return Route(way.bandwidth * attained.link, way.latency, network=False)
    devices = _used(node.devices, world, together)
    leaving = min(stride, devices)  # ranks of a node whose neighbour is in another
    way_out = network.bandwidth * attained.network / leaving
    if world > devices * network.nodes:  # likewise of all the nodes under a switch
        above = network.nodes * network.bandwidth * attained.network / network.taper
        way_out = min(way_out, above / min(stride, devices * network.nodes))
    return Route(min(node.bandwidth * attained.link, way_out), network.latency, network=True)


def _used(devices: int, world: int, together: int) -> int:
    """Of a node, by a job that is spread evenly over as few nodes as hold it, or fills them where it cannot be, or only
    by parting ranks that are to lie together.
    """
    nodes = -(-world // devices)
    even = world // nodes if world % nodes == 0 else devices
    whole = devices - devices % together
    return whole if even % together and whole * nodes >= world else even
