"""The place of a rank, and the matrix of all ranks: arithmetic on the topology."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megascale.layout.stages import looped
from megascale.layout.topology import Topology
from megascale.operate.show.neighbours import Flow, place_of
from megascale.operate.show.rank_grid import rank_matrix

SIZES = st.integers(1, 5)


def test_a_rank_in_the_middle_of_a_pipeline() -> None:
    place = place_of(Topology(tp=2, dp=2, pp=3), 5)
    assert place.index == (("tp", 1, 2), ("cp", 0, 1), ("dp", 0, 2), ("pp", 1, 3))
    assert place.groups == {"tp": (4, 5), "dp": (5, 7), "pp": (1, 5, 9)}
    assert set(place.flows) == {
        Flow("from", 1, "activations"), Flow("to", 1, "gradients of activations"),
        Flow("to", 9, "activations"), Flow("from", 9, "gradients of activations"),
    }  # fmt: skip


def test_groups_of_experts() -> None:
    topology = Topology(tp=2, dp=2, pp=2, ep=2)
    assert place_of(topology, 6).groups == {
        "tp": (6, 7), "dp": (4, 6), "pp": (2, 6), "ep": (6, 7), "edp": (4, 6)
    }  # fmt: skip
    assert place_of(Topology(dp=4, ep=4), 1).groups == {"dp": (0, 1, 2, 3), "ep": (0, 1, 2, 3)}


def test_the_ends_of_a_pipeline_meet_with_virtual_stages_only() -> None:
    topology = Topology(pp=3)
    assert place_of(topology, 0).flows == (Flow("to", 1, "activations"), Flow("from", 1, "gradients of activations"))
    assert Flow("from", 2, "activations") in place_of(topology, 0, looped(3, 2)).flows
    assert place_of(Topology(dp=4), 2).flows == ()


@given(SIZES, SIZES, SIZES)
def test_what_one_rank_sends_another_receives(tp: int, dp: int, pp: int) -> None:
    topology = Topology(tp=tp, dp=dp, pp=pp)
    places = [place_of(topology, rank, looped(pp, 2)) for rank in range(topology.world_size)]
    flows = {(place.rank, flow) for place in places for flow in place.flows}
    turned = {"from": "to", "to": "from"}
    assert flows == {(flow.rank, Flow(turned[flow.direction], rank, flow.what)) for rank, flow in flows}


@given(SIZES, SIZES, SIZES, SIZES)
def test_the_matrix_has_every_rank_once_in_its_stage_and_replica(tp: int, cp: int, dp: int, pp: int) -> None:
    topology = Topology(tp=tp, cp=cp, dp=dp, pp=pp)
    matrix = rank_matrix(topology)
    assert sorted(matrix.ranks.ravel()) == list(range(topology.world_size))
    for (row, column), rank in np.ndenumerate(matrix.ranks):
        coord = topology.coord(int(rank))
        assert (coord.pp * tp + coord.tp, coord.dp * cp + coord.cp) == (row, column)
    assert [label for label in matrix.labels if label] == [f"pp {stage}" for stage in range(pp)]


def test_ranks_without_a_value_are_not_a_number() -> None:
    matrix = rank_matrix(Topology(tp=2, dp=2))
    assert matrix.of(np.array([1.0, 2.0, 3.0])).tolist()[0] == [1.0, 3.0]
    assert np.isnan(matrix.of(np.array([1.0, 2.0, 3.0]))[1, 1])
