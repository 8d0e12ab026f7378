"""Ranks, coordinates and groups of a topology."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config.run import RunConfig
from megascale.layout.topology import AXES, Coord, Topology, topology_of
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
