"""Closed components of a directed graph: strongly connected components without edges to other nodes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def closed_components(edges: Mapping[Node, Sequence[Node]]) -> Iterator[set[Node]]:
    """Yield the closed components (Tarjan 1972, without recursion). `edges`: the targets of every node."""
    order: dict[Node, int] = {}
    low: dict[Node, int] = {}
    path: list[Node] = []
    complete: set[Node] = set()
    for root in edges:
        visits = [(root, iter(edges[root]))] if root not in order else []
        while visits:
            node, targets = visits[-1]
            if node not in order:
                order[node] = low[node] = len(order)
                path.append(node)
            for target in targets:
                if target not in order:
                    visits.append((target, iter(edges.get(target, ()))))
                    break
                if target not in complete:
                    low[node] = min(low[node], order[target])
            else:
                visits.pop()
                if visits:
                    below = visits[-1][0]
                    low[below] = min(low[below], low[node])
                if low[node] == order[node]:
                    component = _take_down_to(node, path)
                    complete |= component
                    if all(target in component for member in component for target in edges.get(member, ())):
                        yield component


def _take_down_to(node: Node, path: list[Node]) -> set[Node]:
    taken = {node}
    while (last := path.pop()) != node:
        taken.add(last)
    return taken
