"""The split of layers into pipeline stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.layout.stages import split_layers


@given(pp=st.integers(1, 8), vpp=st.integers(1, 6), extra=st.integers(0, 60))
def test_layers_are_split_as_evenly_as_possible(pp: int, vpp: int, extra: int) -> None:
    layers = pp * vpp + extra
    stages = split_layers(layers, pp, vpp)
    held = [list(stages.layers(stage)) for stage in range(stages.count)]
    assert [layer for part in held for layer in part] == list(range(layers))
    sizes = [len(part) for part in held]
    assert max(sizes) - min(sizes) <= 1
    by_rank = [sum(sizes[stages.index(rank, chunk)] for chunk in range(vpp)) for rank in range(pp)]
    assert max(by_rank) - min(by_rank) <= 1


def test_first_and_last_stage_have_the_fewest_layers() -> None:
    assert [len(split_layers(10, 4, 1).layers(stage)) for stage in range(4)] == [2, 3, 3, 2]


def test_layers_as_given() -> None:
    stages = split_layers(6, 2, 2, (0, 3, 2, 1))
    assert [len(stages.layers(stage)) for stage in range(4)] == [0, 3, 2, 1]
    assert stages.index(rank=1, chunk=1) == 3


@pytest.mark.parametrize("given_layers", [(), (1, 2), (3, 3, 1, 1), (2, 2, 1)])
def test_layers_that_do_not_fit_are_refused(given_layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="6 layers"):
        split_layers(6, 2, 2, given_layers)
