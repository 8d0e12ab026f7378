"""The order in which ranks fill a job's nodes, by the switches above them (`NodeOrder`).

Ranks lie in the order tp, cp, dp, pp, so the groups that exchange most fill neighbouring nodes. Nodes are joined from
the inside out, those of a context, expert or sharding group, then those of a pipeline stage, each time below the lowest
switch that has enough of them left: no group crosses a switch that it could avoid, and stages, which send each other
least, lie on both sides of the slowest links. With `parallel.far_axis = "dp"` stages have equal parts in all islands.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megascale.config.parallel import ParallelConfig
from megascale.operate.driver.roster import format_nodes
from megascale.operate.driver.switches import Switches


class _Block(NamedTuple):
    """Nodes that stay together, and the switches above all of them."""

    path: tuple[str, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class NodeOrder:
    """An order of nodes by `switches`; without any it is the scheduler's. `groups`: nodes of nested groups of ranks,
    the smallest first, a pipeline stage's last; `far_dp`: every island has a part of each stage.
    """

    switches: Switches = field(default_factory=dict)
    groups: tuple[int, ...] = (1,)
    far_dp: bool = False

    @classmethod
    def of_layout(cls, switches: Switches, p: ParallelConfig, nodes: int) -> NodeOrder:
        """Return the order for a resolved layout on `nodes`."""
        per_node, sizes, own = p.replica_size * p.replicas // nodes, [1], p.tp * p.cp
        for ranks in sorted((own, p.ep, own * (p.dp_shard or 1), own * p.replicas)):
            size = math.lcm(ranks, per_node) // per_node
            if size % sizes[-1] == 0:
                sizes.append(size)
        return cls(switches, tuple(sizes), p.far_axis == "dp")

    def arrange(self, nodes: Sequence[str], count: int) -> list[str]:
        """Order `nodes`, of which the first `count` have ranks."""
        if not self.switches:
            return list(nodes)
        near = self._near(nodes)
        blocks = [*self._across(near, count)] or self._pack(near, self.groups, count)
        used = dict.fromkeys(node for block in blocks for node in block.nodes)
        return [*used, *(node for node in near if node not in used)]

    def fill(self, places: Sequence[str | None], idle: Sequence[str]) -> list[str | None]:
        """Fill the places without a node with idle ones: all in order, or each with the node that shares most switches
        with those of its stage.
        """
        filled, rest = [*places], self.arrange(idle, places.count(None))
        for at in [at for at, node in enumerate(places) if node is None][: len(rest)]:
            first = at - at % self.groups[-1]
            beside = [self._path(node) for node in places[first : first + self.groups[-1]] if node]
            shared = [sum(_shared(self._path(node), path) for path in beside) for node in rest]
            filled[at] = rest.pop(shared.index(max(shared)))
        return filled

    def warnings(self, nodes: Sequence[str]) -> Iterator[str]:
        """Yield what keeps the nodes with ranks from the order that is asked for."""
        unknown = [node for node in nodes if node not in self.switches]
        if self.switches and unknown:
            yield f"the topology file has no {format_nodes(unknown)}: placed as if alone"
        if self.far_dp and not [*self._across(nodes, len(nodes))]:
            islands = ", ".join(map(str, map(len, self._islands(nodes).values())))
            yield (f"parallel.far_axis = dp has no effect: islands of {islands} nodes have no equal parts of the "
                   f"{self.groups[-1]} nodes of each stage")  # fmt: skip

    def _path(self, node: str) -> tuple[str, ...]:
        return self.switches.get(node, ())

    def _near(self, nodes: Iterable[str]) -> list[str]:
        """Sort nodes so that those below a switch are neighbours, in the file's order of switches."""
        names = dict.fromkeys(itertools.chain.from_iterable(self.switches.values()))
        numbers = {switch: number for number, switch in enumerate(names)}
        return sorted(nodes, key=lambda node: [numbers[switch] for switch in self._path(node)])

    def _islands(self, nodes: Iterable[str]) -> Mapping[tuple[str, ...], list[str]]:
        """Group nodes by the widest switches that not all of them share."""
        islands, above = defaultdict[tuple[str, ...], list[str]](list), {node: self._path(node) for node in nodes}
        shared = min((_shared(one, other) for one, other in itertools.pairwise(above.values())), default=0)
        for node, path in above.items():
            islands[path[: shared + 1]].append(node)
        return islands

    def _across(self, nodes: Iterable[str], count: int) -> Iterator[_Block]:
        """Yield the parts of each stage, from one island after another; nothing if islands have no equal parts."""
        islands, stage = self._islands(nodes), self.groups[-1]
        part = stage // len(islands) if self.far_dp and stage % len(islands) == 0 else 0
        if not part or len(islands) == 1:
            return
        sizes = [*(size for size in self.groups if size < part and part % size == 0), part]
        parts = [self._pack(island, sizes, count // len(islands)) for island in islands.values()]
        if all(len(blocks) == count // stage for blocks in parts):
            yield from itertools.chain.from_iterable(zip(*parts, strict=True))

    def _pack(self, nodes: Sequence[str], sizes: Sequence[int], count: int) -> list[_Block]:
        """Join nodes in blocks of the largest of nested `sizes`, and return as many as have `count` nodes, of those
        below the lowest switches, in the order of `nodes`.
        """
        blocks = [_Block(self._path(node), (node,)) for node in nodes]
        for inner, outer in itertools.pairwise(sizes):
            blocks = [*_join(blocks, outer // inner)]
        lowest = sorted(blocks, key=lambda block: -len(block.path))[: count // sizes[-1]]
        place = {node: number for number, node in enumerate(nodes)}
        return sorted(lowest, key=lambda block: place[block.nodes[0]])


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Count the switches above both nodes."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _join(blocks: Sequence[_Block], count: int) -> Iterator[_Block]:
    """Join `count` blocks each, below the lowest switches first; blocks that are left over at the top are dropped."""
    rest = list(blocks)
    for level in range(max((len(block.path) for block in blocks), default=0), -1, -1):
        below = defaultdict[tuple[str, ...], list[_Block]](list)
        for block in rest:
            below[block.path[:level]].append(block)
        rest = []
        for path, members in below.items():
            whole = len(members) // count * count
            for at in range(0, whole, count):
                yield _Block(path, tuple(node for block in members[at : at + count] for node in block.nodes))
            rest += members[whole:]
