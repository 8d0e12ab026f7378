"""Communication times in seconds, on the links of a collective's group (`group_route`), of pipeline neighbours
(`neighbour_route`); and of each axis of parallelism: `TpCollectives`, `DataParallel`, `ContextRoutes`,
`ExpertRoute`.

For S bytes on n ranks in k nodes, with bandwidth b, latency L between nodes and l inside a node:

    ring, all-gather or reduce-scatter   (n - 1) / n S / b + (k - 1) L + (n - k) l;   all-reduce: twice
    two trees of nodes, all-reduce       2 S / b + 2 log2(k) L + 2 (n / k - 1) l, for k = 2 with S / b

An all-reduce between nodes takes the faster one, as in NCCL (src/graph/tuning.cc). Between islands it takes a ring in
the order of ranks, which enters each island once, and is as fast as its slowest link. A group's ranks are `stride`
apart, and `stride` groups fill a run of ranks. Runs across nodes share a node's network among at most one group per
device, including groups of another run in the node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from megascale.config.parallel import ParallelConfig
from megascale.layout.parts.microbatch_sizes import CommOp
from megascale.layout.pieces import MAX_PIECES
from megascale.layout.topology import DATA_AXES, inner_axes, topology_of
from megascale.plan.simulate.profiles import Hardware

Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True)
class Route:
    """The link of a rank in a group: bytes/s per direction, seconds per message. `network`: across nodes; `ranks`: the
    group's ranks in a node, with links `inside` (bytes/s, seconds). `islands`: of the group, `far_s` seconds apart.
    """

    bandwidth: float
    latency: float
    network: bool
    ranks: int = 1
    inside: tuple[float, float] = (math.inf, 0.0)
    islands: int = 1
    far_s: float = 0.0

    def collective(self, operation: Operation, size: float, ranks: int) -> float:
        """Time a collective over `ranks`. `size`: bytes of the full tensor."""
        if ranks == 1:
            return 0.0
        nodes, (inside, hop) = max(2, math.ceil(ranks / self.ranks)) if self.network else ranks, self.inside
        ring = (ranks - 1) / ranks * size / self.bandwidth + (nodes - 1) * self.latency + (ranks - nodes) * hop
        ring += (self.islands - 1) * self.far_s
        if operation != "all_reduce":
            return ring
        tree = (1 if nodes == 2 else 2) * size / self.bandwidth + 2 * math.ceil(math.log2(nodes)) * self.latency
        tree = max(tree, 2 * size / inside) + 2 * (self.ranks - 1) * hop
        return min(2 * ring, tree) if self.network and self.islands == 1 else 2 * ring

    def message(self, size: float) -> float:
        """Time a point-to-point message of `size` bytes."""
        return size / self.bandwidth + (self.latency if self.islands == 1 else self.far_s)


def group_route(hardware: Hardware, size: int, stride: int, world: int, *, together: int = 1) -> Route:
    """Find the link of `size` ranks, `stride` apart in a job of `world`. `together`: ranks to place in one node."""
    node, network, attained = hardware.node, hardware.network, hardware.attained
    devices, run = _used(node.devices, world, together), size * stride
    inside = node.bandwidth * attained.link
    if devices % run == 0:
        return _across(hardware, Route(inside, node.latency, network=False), run, stride, world)
    groups = min(devices, stride if run % devices == 0 or run == world else 2 * stride)
    outside = network.bandwidth * attained.network / groups
    if run > devices * network.nodes:
        outside /= network.taper
    within = (devices // stride, (inside, node.latency)) if devices >= 2 * stride else ()
    return _across(hardware, Route(min(inside, outside), network.latency, True, *within), run, stride, world)


def _across(hardware: Hardware, route: Route, run: int, stride: int, world: int) -> Route:
    """Limit the route of a group that fills a run of ranks to its share of the links between islands."""
    islands = hardware.islands
    if islands is None or islands.devices >= world or islands.devices % run == 0:
        return route
    groups = min(islands.devices, stride if run % islands.devices == 0 or run == world else 2 * stride)
    share = islands.bandwidth * hardware.attained.network / groups
    crossed = max(2, math.ceil(run / islands.devices))
    return replace(route, bandwidth=min(route.bandwidth, share), network=True, islands=crossed, far_s=islands.latency)


def neighbour_route(hardware: Hardware, stride: int, world: int, *, together: int = 1) -> Route:
    """Find the link to the rank `stride` further while all ranks send. `together`: as in `group_route`."""
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
    """Count the used devices per node: equal shares of the fewest nodes, or full nodes if shares would cut groups."""
    nodes = -(-world // devices)
    even = world // nodes if world % nodes == 0 else devices
    full_groups = devices - devices % together
    return full_groups if even % together and full_groups * nodes >= world else even


@dataclass(frozen=True)
class TpCollectives:
    """Tensor-parallel collectives on activations of `size` bytes, with `Overlaps.tp` and `StageTimes.slowdown`."""

    route: Route
    tp: int
    sp: bool
    size: int
    overlaps: str
    slowdown: float

    def gather(self) -> float:
        """Time an all-gather."""
        return self.route.collective("all_gather", self.size, self.tp)

    def exposed(self, gemm: float, *, enters: bool, backward: bool = False) -> float:
        """Exposed seconds of a collective on the input (`enters`) or the output of a GEMM of `gemm` seconds."""
        overlaps = self.overlaps in ("all", "domino") or (self.overlaps == "backward" and backward and not enters)
        if self.overlaps == "domino" and backward:
            gemm *= 2  # dgrad and wgrad of the other half
        if self.sp:
            return self._exposed(self.gather(), gemm, overlaps, pieces=self.overlaps == "all")
        # without sequence parallelism inputs are replicated
        return 0.0 if enters else self._exposed(self.route.collective("all_reduce", self.size, self.tp), gemm, overlaps)

    def regathered(self, wgrad: float) -> float:
        """Exposed seconds of an input's all-gather for wgrad. `wgrad`: seconds of the GEMM."""
        return self._exposed(self.gather(), wgrad, self.overlaps != "none") if self.sp else 0.0

    def _exposed(self, sent: float, gemm: float, overlaps: bool, pieces: bool = False) -> float:
        least = max(1 / MAX_PIECES if pieces else 0.0, self.slowdown)
        return max(least * sent, sent - gemm) if overlaps else sent


Buckets = tuple[tuple[tuple[str, ...], int, int], ...]
"""The axes over which buckets are reduced, their elements, and the bytes of their weights as they are gathered."""


@dataclass(frozen=True)
class DataParallel:
    """Data-parallel collectives. `groups`: link and ranks by the axes of a reduction, of those that shard; `copies`: of
    those with the same shards; `sharded`: ZeRO stage 1 or higher; `gradient`: bytes of an element, `code`: on its way
    to the ranks that shard.
    """

    groups: Mapping[tuple[str, ...], tuple[Route, int]]
    copies: tuple[Route, int]
    sharded: bool
    gradient: int
    code: int

    @classmethod
    def of_layout(cls, hardware: Hardware, p: ParallelConfig, sharded: bool, gradient: int) -> DataParallel:
        """Build from a layout; `gradient`: bytes of an element."""
        topology = topology_of(p)
        strides = {DATA_AXES: topology.tp, ("edp",): topology.ep}

        def group(ranks: int, stride: int) -> tuple[Route, int]:
            return group_route(hardware, ranks, stride, topology.world_size, together=topology.tp), ranks

        groups = {axes: group(topology.size(*inner_axes(axes)), stride) for axes, stride in strides.items()}
        inner = topology.tp * topology.size(*inner_axes(DATA_AXES))
        code = 1 if p.grad_reduce == "fp8" else gradient
        return cls(groups, group(topology.dp_replicate, inner), sharded, gradient, code)

    @property
    def network(self) -> bool:
        """A collective goes between nodes."""
        return any(route.network for route, _ in [*self.groups.values(), self.copies])

    def shard(self, buckets: Buckets) -> float:
        """Count the elements of this rank's shards of buckets."""
        return sum(numel / (self.groups[axes][1] if self.sharded else 1) for axes, numel, _ in buckets)

    def reduce(self, buckets: Buckets) -> float:
        """Time the gradient reduction of buckets."""
        sent = ((axes, self.code * numel) for axes, numel, _ in buckets)
        return self._seconds("reduce_scatter" if self.sharded else "all_reduce", sent)

    def sum_copies(self, buckets: Buckets) -> float:
        """Time the sum of buckets' shards over their copies, at a step's end."""
        route, ranks = self.copies
        shards = (self.gradient * numel / self.groups[axes][1] for axes, numel, _ in buckets)
        return sum(route.collective("all_reduce", nbytes, ranks) for nbytes in shards)

    def gather(self, buckets: Buckets) -> float:
        """Time the weight all-gather of buckets, 0 without sharding."""
        return self._seconds("all_gather", ((axes, sent) for axes, _, sent in buckets)) if self.sharded else 0.0

    def _seconds(self, operation: Operation, sent: Iterable[tuple[tuple[str, ...], int]]) -> float:
        links = ((*self.groups[axes], nbytes) for axes, nbytes in sent)
        return sum(route.collective(operation, nbytes, ranks) for route, ranks, nbytes in links)


@dataclass(frozen=True)
class ContextRoutes:
    """The links of `cp_heads` ranks that exchange heads, and of `cp_keys` ranks that exchange keys and values.
    `slowdown`: as in `StageTimes`; `overlap`: a ring's messages overlap with attention.
    """

    heads: Route
    keys: Route
    cp_heads: int
    cp_keys: int
    slowdown: float
    overlap: bool

    @classmethod
    def of_layout(cls, hardware: Hardware, p: ParallelConfig, world: int, overlap: bool) -> ContextRoutes:
        heads = group_route(hardware, p.cp_heads, p.tp, world, together=p.tp)
        keys = group_route(hardware, p.cp_keys, p.tp * p.cp_heads, world, together=p.tp)
        return cls(heads, keys, p.cp_heads, p.cp_keys, 1 - hardware.attained.overlap, overlap)

    def exposed(self, exchanges: Iterable[CommOp], attention: float) -> float:
        """Exposed seconds of the exchanges of a pass of attention that computes for `attention` seconds. Only keys and
        values that travel in a ring overlap with it.
        """
        total, hidden = 0.0, attention * (self.cp_keys - 1) / self.cp_keys if self.overlap else 0.0
        for sent in exchanges:
            if sent.operation == "send_on":
                seconds = self.keys.message(sent.bytes / sent.calls) * sent.calls
                total += max(self.slowdown * seconds, seconds - hidden)
            else:
                route, ranks = (self.heads, self.cp_heads) if sent.group == "cp.heads" else (self.keys, self.cp_keys)
                total += route.collective("all_gather", sent.bytes, ranks)  # the others move as much as an all-gather
        return total


@dataclass(frozen=True)
class ExpertRoute:
    """The links of `ranks` neighbours that exchange tokens, of which `inside` share a node: bytes/s of a rank in the
    `node` and of its share of the `network`, and seconds of a message. Both links send at the same time. `relayed`: the
    share of the network's bytes that pass the node's links first.
    """

    ranks: int
    inside: int
    node: float
    network: float
    latency: float
    relayed: float = 0.0

    @classmethod
    def of_layout(cls, hardware: Hardware, p: ParallelConfig, world: int) -> ExpertRoute:
        node, network, attained = hardware.node, hardware.network, hardware.attained
        devices = _used(node.devices, world, p.tp)
        inside, outside = math.gcd(p.ep, devices), network.bandwidth * attained.network / devices
        outside /= network.taper if p.ep > devices * network.nodes else 1
        latency, far = node.latency if inside == p.ep else network.latency, hardware.islands
        if far and far.devices < world and far.devices % p.ep:  # as if all went between islands
            outside, latency = min(outside, far.bandwidth * attained.network / far.devices), far.latency
        relayed = (devices - 1) / devices if network.rail_only else 0.0
        return cls(p.ep, inside, node.bandwidth * attained.link, outside, latency, relayed)

    def seconds(self, sent: CommOp) -> float:
        """Time an all-to-all, of the bytes that a rank sends to the others together, or an all-gather."""
        within, across = (self.inside - 1) / (self.ranks - 1), (self.ranks - self.inside) / (self.ranks - 1)
        nbytes = sent.bytes * (self.ranks - 1) / self.ranks if sent.operation == "all_gather" else sent.bytes
        within += self.relayed * across
        return nbytes * max(within / self.node, across / self.network) + sent.calls * self.latency

    def exposed(self, exchanges: Iterable[CommOp], gemms: float) -> float:
        """Exposed seconds of the exchanges of a pass: of counts, and of r blocks of tokens, whose `gemms` overlap with
        dispatches D and combines C of other blocks. These have one link in turn: D1 D2 C1 D3 C2 .. Dr Cr-1 Cr.
        """
        *before, dispatch, combine = exchanges
        blocks, alone = dispatch.calls, sum(map(self.seconds, before))
        d, c, g = self.seconds(dispatch) / blocks, self.seconds(combine) / blocks, gemms / blocks
        if blocks == 1:
            return alone + d + c
        return alone + d + c + max(0.0, d - g) + max(0.0, c - g) + (blocks - 2) * max(0.0, d + c - g)
