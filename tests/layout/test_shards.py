"""Boxes of parameters: every element of the model is in exactly one place."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.config.model import ModelConfig
from megascale.layout.shards import boxes
from megascale.layout.tensors import Parameter, Tensor, matrix, whole
from megascale.layout.topology import Coord, Topology
from tests.runs import GPT, LLAMA

MODELS = {"gpt": ModelConfig(**GPT), "llama": ModelConfig(**LLAMA)}
ALONE = Topology()


def fill(
    parameter: Parameter, topology: Topology, coord: Coord, start: int, stop: int, count: dict[str, np.ndarray]
) -> None:
    """Add one to every element of the global tensors that the boxes of a range cover."""
    for box in boxes(parameter, topology, coord, start, stop):
        shape = next(tensor.shape for tensor in parameter.parts if tensor.name == box.name)
        place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
        count.setdefault(box.name, np.zeros(shape, dtype=int))[place] += 1


def covered(parameters: list[Parameter], topology: Topology) -> dict[str, np.ndarray]:
    """How often the ranks that shard each parameter hold each element of its tensors."""
    count: dict[str, np.ndarray] = {}
    for parameter in parameters:
        for indices in itertools.product(*(range(getattr(topology, axis)) for axis in parameter.sharding)):
            coord = Coord(**dict(zip(parameter.sharding, indices, strict=True)))
            fill(parameter, topology, coord, 0, parameter.local_numel(topology), count)
    return count


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    edges=st.lists(st.floats(0, 1), min_size=0, max_size=4),
    names=st.integers(1, 3),
)
def test_any_cuts_of_a_flat_parameter_cover_it_once(shape: list[int], edges: list[float], names: int) -> None:
    parameter = matrix("p", *(Tensor(f"t{i}", tuple(shape)) for i in range(names)))
    size = parameter.local_numel(ALONE)
    cuts = sorted({0, size, *(int(edge * size) for edge in edges)})
    count: dict[str, np.ndarray] = {}
    for start, stop in itertools.pairwise(cuts):
        found = list(boxes(parameter, ALONE, Coord(), start, stop))
        assert sum(math.prod(box.size) for box in found) == stop - start
        assert len(found) <= names * (2 * len(shape) - 1)
        assert [box.start for box in found] == sorted(box.start for box in found)
        fill(parameter, ALONE, Coord(), start, stop, count)
    assert all((times == 1).all() for times in count.values()) and len(count) == names


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), data=st.data())
def test_a_box_holds_the_elements_that_its_range_does(shape: list[int], data: st.DataObject) -> None:
    parameter = matrix("p", Tensor("t", tuple(shape)))
    size = math.prod(shape)
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    elements = np.arange(size).reshape(shape)
    for box in boxes(parameter, ALONE, Coord(), start, stop):
        place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
        assert elements[place].ravel().tolist() == list(range(box.start, box.start + math.prod(box.size)))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_ranks_of_tp_hold_every_tensor(family: str, tp: int) -> None:
    parameters = whole(MODELS[family])
    count = covered(parameters, Topology(tp=tp, dp=3))
    expected = {tensor.name: tensor.shape for parameter in parameters for tensor in parameter.parts}
    assert {name: times.shape for name, times in count.items()} == expected
    assert all((times == 1).all() for times in count.values())


@pytest.mark.parametrize("sharding", [{"dp": 0}, {"dp": 0, "tp": 1}, {"tp": 2, "dp": 0}, {"dp": 0, "tp": 0}])
@given(shape=st.tuples(*[st.integers(1, 9)] * 3), multiple=st.integers(1, 4))
def test_other_axes_than_tp_may_shard(sharding: dict[str, int], shape: tuple[int, ...], multiple: int) -> None:
    """As experts are sharded over data parallelism, and each over tp: [experts, rows, columns]."""
    parameter = matrix("p", *(Tensor(name, shape, sharding, multiple=multiple) for name in ("gate", "up")))
    count = covered([parameter], Topology(tp=2, dp=3, pp=2))
    assert set(count) == {"gate", "up"} and all((times == 1).all() for times in count.values())
