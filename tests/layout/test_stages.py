"""The split of layers into pipeline stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.layout.stages import Placement, looped, split_layers


@given(pp=st.integers(1, 8), vpp=st.integers(1, 6), extra=st.integers(0, 60))
def test_layers_are_split_as_evenly_as_possible(pp: int, vpp: int, extra: int) -> None:
    layers = pp * vpp + extra
    stages = split_layers(layers, looped(pp, vpp))
    held = [list(stages.layers(stage)) for stage in range(stages.count)]
    assert [layer for part in held for layer in part] == list(range(layers))
    sizes = [len(part) for part in held]
    assert max(sizes) - min(sizes) <= 1
    by_rank = [sum(sizes[stages.index(rank, chunk)] for chunk in range(vpp)) for rank in range(pp)]
    assert max(by_rank) - min(by_rank) <= 1


def test_first_and_last_stage_have_the_fewest_layers() -> None:
    assert [len(split_layers(10, looped(4, 1)).layers(stage)) for stage in range(4)] == [2, 3, 3, 2]


def test_layers_as_given() -> None:
    stages = split_layers(6, looped(2, 2), (0, 3, 2, 1))
    assert [len(stages.layers(stage)) for stage in range(4)] == [0, 3, 2, 1]
    assert stages.index(rank=1, chunk=1) == 3


@pytest.mark.parametrize("given_layers", [(), (1, 2), (3, 3, 1, 1), (2, 2, 1)])
def test_layers_that_do_not_fit_are_refused(given_layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="6 layers"):
        split_layers(6, looped(2, 2), given_layers)


@given(p=st.integers(1, 9), v=st.integers(1, 6))
def test_a_loop_goes_around_the_ranks(p: int, v: int) -> None:
    placement = looped(p, v)
    assert (placement.p, placement.v, placement.count) == (p, v, p * v)
    for stage, (rank, chunk) in enumerate(placement.places):
        assert (rank, chunk) == (stage % p, stage // p)
        assert placement.stage(rank, chunk) == stage
    line = {(rank, rank + 1) for rank in range(p - 1)}
    assert {*placement.links} == line | ({(0, p - 1)} if v > 1 and p > 1 else set())


def test_another_placement_is_a_value() -> None:
    """Stages in a V."""
    placement = Placement(((0, 5), (1, 4), (2, 3)))
    assert placement.places == ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1))
    assert placement.links == ((0, 1), (1, 2))
    stages = split_layers(12, placement)
    assert [list(stages.layers(stages.index(0, chunk))) for chunk in range(2)] == [[0, 1], [10, 11]]
