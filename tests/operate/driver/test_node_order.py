"""Ranks on nodes: no group of tp, ep or dp crosses a switch that it could avoid, and pipelines cross the slow links."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulation import Simulation
from megascale.config.fault import FaultConfig
from megascale.config.parallel import ParallelConfig
from megascale.layout.topology import Topology, topology_of
from megascale.operate.driver.job_state import JobPlan
from megascale.operate.driver.node_order import NodeOrder
from megascale.operate.driver.roster import node_by_rank, place_ranks

Paths = Mapping[str, tuple[str, ...]]


def shuffled(paths: Paths, seed: int = 0) -> list[str]:
    """The nodes in the order of a scheduler that knows nothing of switches."""
    return random.Random(seed).sample(list(paths), len(paths))


def tree(*islands: Sequence[int]) -> Paths:
    """Racks of so many nodes in each island."""
    return {
        f"i{island}r{rack}n{node}": (f"i{island}", f"r{island}{rack}")
        for island, racks in enumerate(islands)
        for rack, nodes in enumerate(racks)
        for node in range(nodes)
    }


def crossing(topology: Topology, nodes: Sequence[str], paths: Paths, axis: str, level: int) -> int:
    """Count the groups along an axis that lie below several switches of a level."""
    of_rank = node_by_rank(place_ranks(nodes, topology.world_size))
    groups = {tuple(topology.group(rank, axis)) for rank in range(topology.world_size)}
    return sum(len({paths[of_rank[rank]][: level + 1] for rank in group}) > 1 for group in groups)


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(0, 9),
)
@settings(deadline=None, max_examples=200)
def test_as_many_stages_as_can_lie_below_one_switch(islands: list[list[int]], stage: int, seed: int) -> None:
    """At every level of switches: below a switch of n nodes lie n div stage of them, if the job has as many."""
    paths = tree(*islands)
    pp = len(paths) // stage
    p = ParallelConfig(tp=2, dp=stage, pp=max(1, pp))
    if pp == 0:
        return
    nodes = NodeOrder.of_layout(paths, p, pp * stage).arrange(shuffled(paths, seed), pp * stage)
    assert sorted(nodes) == sorted(paths)
    used, topology = nodes[: pp * stage], topology_of(p)
    assert crossing(topology, used, paths, "tp", 1) == 0
    for level in (0, 1):
        below = Counter(path[: level + 1] for path in paths.values())
        most = min(pp, sum(count // stage for count in below.values()))
        stages = [used[at : at + stage] for at in range(0, len(used), stage)]
        assert sum(len({paths[node][: level + 1] for node in own}) == 1 for own in stages) == most


@pytest.mark.parametrize("seed", range(5))
def test_groups_inside_racks_and_pipelines_across_islands(seed: int) -> None:
    """8 GPUs a node: tp in a node, ep in a rack, dp in an island, pp across."""
    paths = tree([4, 4], [4, 4])
    p = ParallelConfig(tp=4, dp=16, pp=2, ep=32)
    topology, order = topology_of(p), NodeOrder.of_layout(paths, p, 16)
    assert order.groups[-2:] == (4, 8)
    nodes = order.arrange(shuffled(paths, seed), 16)
    assert [crossing(topology, nodes, paths, axis, 1) for axis in ("tp", "ep")] == [0, 0]
    assert [crossing(topology, nodes, paths, axis, 0) for axis in ("dp", "pp")] == [0, 64]
    unordered = shuffled(paths, seed)
    assert crossing(topology, unordered, paths, "dp", 0) > 0, "the shuffled order needs the topology"


def test_ranks_that_shard_are_in_a_rack() -> None:
    paths = tree([3, 3])
    nodes = NodeOrder.of_layout(paths, ParallelConfig(dp=4, dp_shard=2), 4).arrange(shuffled(paths), 4)
    racks = [paths[node][:2] for node in nodes]
    assert racks[0] == racks[1] != racks[2] == racks[3]


def test_spares_are_what_would_cut_stages() -> None:
    paths = tree([3], [3])
    nodes = NodeOrder(paths, (1, 2)).arrange(sorted(paths), 4)
    assert nodes == ["i0r0n0", "i0r0n1", "i1r0n0", "i1r0n1", "i0r0n2", "i1r0n2"]


def test_dp_across_islands() -> None:
    """Each stage has as many nodes in both islands, and dp ranks of the same island are neighbours."""
    paths = tree([2, 2], [2, 2])
    p = ParallelConfig(tp=2, dp=4, pp=2, far_axis="dp")
    order = NodeOrder.of_layout(paths, p, 8)
    nodes = order.arrange(shuffled(paths), 8)
    assert [paths[node][0] for node in nodes] == ["i0", "i0", "i1", "i1"] * 2
    topology = topology_of(p)
    assert [crossing(topology, nodes, paths, axis, 0) for axis in ("tp", "pp", "dp")] == [0, 0, 4]
    assert list(order.warnings(nodes)) == []
    three = list(paths)[:3] + list(paths)[-1:]
    (said,) = NodeOrder(paths, (1, 2), far_dp=True).warnings(three)
    assert said.startswith("parallel.far_axis = dp has no effect: islands of 3, 1 nodes")


def test_without_switches_the_order_is_the_schedulers() -> None:
    names = ["b", "a", "c"]
    assert NodeOrder().arrange(names, 2) == names
    assert NodeOrder().fill(["b", None, None], ["c", "a"]) == ["b", "c", "a"]
    assert list(NodeOrder().warnings(names)) == []


def test_a_spare_of_the_same_switch_replaces_a_lost_node() -> None:
    paths = tree([3], [3])
    order = NodeOrder(paths, (1, 2))
    spares = ["i0r0n2", "i1r0n2"]
    assert order.fill(["i0r0n0", "i0r0n1", "i1r0n0", None], spares)[3] == "i1r0n2"
    assert order.fill([None, "i0r0n1", "i1r0n0", "i1r0n1"], spares)[0] == "i0r0n2"


def test_nodes_that_the_file_lacks_are_named() -> None:
    paths = tree([2])
    assert list(NodeOrder(paths).warnings([*paths, "new"])) == ["the topology file has no new: placed as if alone"]
    assert NodeOrder(paths, (1, 2)).arrange(["new", *paths], 2)[:2] == list(paths)


def test_a_job_starts_its_ranks_in_the_order_and_keeps_it() -> None:
    paths = {f"node{number}": (f"i{number % 2}",) for number in range(6)}
    plan = JobPlan("run", 4, 8, ("train",), "/logs", order=NodeOrder(paths, (1, 2)))
    sim = Simulation(plan, FaultConfig(), 2)
    sim.run(500.0)
    assert sim.trains and sim.job.used == ["node0", "node2", "node1", "node3"]
    sim.lose_node("node1")
    sim.run(3000.0)
    assert sim.trains and sim.job.used == ["node0", "node2", "node5", "node3"]
