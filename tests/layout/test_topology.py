"""Ranks, coordinates and groups of a topology."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config.run import RunConfig
from megascale.layout.topology import AXES, REPLICATE, Coord, Topology, inner_axes, topology_of
from tests.drawn import jobs

SIZES = st.builds(Topology, *(st.integers(1, 5) for _ in AXES))


@given(SIZES)
def test_rank_and_coord_are_inverse_functions(topology: Topology) -> None:
    coords = [topology.coord(rank) for rank in range(topology.world_size)]
    assert len(set(coords)) == topology.world_size
    assert [topology.rank(coord) for coord in coords] == list(range(topology.world_size))


@settings(max_examples=40)
@given(SIZES, st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_world(topology: Topology, axes: set[str]) -> None:
    groups = topology.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    for group in groups:
        assert all(topology.group(rank, *axes) == group for rank in group)
        places = [topology.index_in_group(topology.coord(rank), *axes) for rank in group]
        assert places == list(range(topology.size(*axes)))
        fixed = {tuple(getattr(topology.coord(rank), axis) for axis in AXES if axis not in axes) for rank in group}
        assert len(fixed) == 1


def test_tp_is_fastest_and_pp_slowest() -> None:
    topology = Topology(tp=8, cp=1, dp=192, pp=8)
    assert topology.world_size == 12_288
    assert topology.group(5000, "tp") == list(range(5000, 5008))
    assert topology.coord(5000) == Coord(tp=0, cp=0, dp=5000 // 8 % 192, pp=5000 // (8 * 192))
    assert topology.group(0, "pp") == [stage * 8 * 192 for stage in range(8)]


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(IndexError, match="4"):
        Topology(tp=2, pp=2).coord(4)


@given(jobs())
def test_a_configuration_has_a_topology(config: RunConfig) -> None:
    topology, p = topology_of(config.parallel), config.parallel
    assert topology == Topology(tp=p.tp, cp=p.cp, dp=config.dp, pp=p.pp)
    assert topology.world_size == config.world_size


def test_neighbours_exchange_heads_and_the_others_keys() -> None:
    topology = Topology(tp=2, cp=6, dp=2, cp_heads=3)
    assert topology.group(13, "cp") == [13, 15, 17, 19, 21, 23]
    assert topology.cp_groups(13) == ([13, 15, 17], [13, 19])
    assert topology.cp_groups(21) == ([19, 21, 23], [15, 21])
    for rank in range(topology.world_size):
        heads, keys = topology.cp_groups(rank)
        assert set(heads) & set(keys) == {rank}
        assert len(heads) * len(keys) == topology.cp


def test_inner_ranks_are_neighbours_with_copies_on_the_others() -> None:
    """Two groups of 2 x 2 x 2 ranks (tp, cp, dp_shard), each with every expert of ep = 4 twice."""
    topology = Topology(tp=2, cp=2, dp=4, ep=4, dp_replicate=2)
    assert (topology.dp_shard, topology.edp, topology.edp_shard) == (2, 4, 2)
    assert topology.group(3, "cp", "dp_shard") == [1, 3, 5, 7] and topology.group(11, "cp", "dp_shard") == [
        9,
        11,
        13,
        15,
    ]
    assert topology.group(3, "edp_shard") == [3, 7] and topology.group(3, "edp") == [3, 7, 11, 15]
    assert topology.group(3, "dp_replicate") == [3, 11]


@settings(max_examples=40)
@given(SIZES, st.integers(1, 3), st.data())
def test_inner_and_outer_ranks_are_those_that_reduce(topology: Topology, copies: int, data: st.DataObject) -> None:
    """Of dense parameters and of experts; weights of inner ranks ascend with them."""
    inner = topology.size("tp", "cp", "dp")
    ep = data.draw(st.sampled_from([ep for ep in range(1, inner + 1) if inner % ep == 0]))
    topology = replace(topology, dp=topology.dp * copies, dp_replicate=copies, ep=ep)
    for axes in (("cp", "dp"), ("edp",)):
        shard = inner_axes(axes)
        for rank in range(topology.size("tp", "cp", "dp")):
            group = topology.group(rank, *axes)
            of_inner, of_outer = topology.group(rank, *shard), topology.group(rank, REPLICATE)
            assert sorted(other for one in of_outer for other in topology.group(one, *shard)) == group
            assert [topology.index_in_group(topology.coord(one), *shard) for one in of_inner] == [*range(len(of_inner))]
            assert [topology.index_in_group(topology.coord(one), REPLICATE) for one in of_outer] == [*range(copies)]
            place = topology.index_in_group(topology.coord(rank), *axes)
            assert place % len(of_inner) == of_inner.index(rank) and place // len(of_inner) == of_outer.index(rank)
