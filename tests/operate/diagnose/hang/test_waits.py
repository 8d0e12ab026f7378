"""Closed components of a graph: every path ends in one."""

from __future__ import annotations

import itertools
import random

from megascale.operate.diagnose.hang.waits import closed_components


def reachable(edges: dict[int, list[int]], node: int) -> set[int]:
    found, todo = {node}, [node]
    while todo:
        new = set(edges.get(todo.pop(), ())) - found
        found |= new
        todo += new
    return found


def test_against_reachability() -> None:
    """A component is closed if each of its nodes reaches exactly the component."""
    draw = random.Random(0)
    for _ in range(200):
        size = draw.randrange(1, 9)
        edges = {node: draw.sample(range(size), draw.randrange(min(3, size) + 1)) for node in range(size)}
        reach = {node: reachable(edges, node) for node in range(size)}
        closed = {frozenset(reach[node]) for node in range(size) if all(reach[m] == reach[node] for m in reach[node])}
        assert set(map(frozenset, closed_components(edges))) == closed, edges


def test_long_paths_need_no_recursion() -> None:
    edges = {node: [node + 1] for node in range(20_000)} | {20_000: [0]}
    (circle,) = closed_components(edges)
    assert len(circle) == 20_001


def test_a_node_without_edges_is_closed() -> None:
    edges = dict(itertools.pairwise(["a", "b", "c"]))
    assert list(closed_components({node: [target] for node, target in edges.items()})) == [{"c"}]
