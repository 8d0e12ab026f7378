"""The boxes of all ranks hold every element of the model exactly once."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.config.model import ModelConfig
from megascale.layout.parameters import all_params
from megascale.layout.shard_slices import shard_slices
from megascale.layout.tensors import ParamSpec, TensorSpec
from megascale.layout.topology import Coord, Topology
from tests.runs import GPT, LLAMA

MODELS = {"gpt": ModelConfig(**GPT), "llama": ModelConfig(**LLAMA)}
ALONE = Topology()


def fill(
    parameter: ParamSpec, topology: Topology, coord: Coord, start: int, stop: int, count: dict[str, np.ndarray]
) -> None:
    """Add 1 to every element of the global tensors covered by the boxes of a range."""
    for box in shard_slices(parameter, topology, coord, start, stop):
        shape = next(tensor.shape for tensor in parameter.parts if tensor.name == box.name)
        place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
        count.setdefault(box.name, np.zeros(shape, dtype=int))[place] += 1


def covered(parameters: list[ParamSpec], topology: Topology) -> dict[str, np.ndarray]:
    """Count how often the shards of the parameters hold the elements of their tensors."""
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
def test_the_ranges_of_a_flat_parameter_cover_it_once(shape: list[int], edges: list[float], names: int) -> None:
    parameter = ParamSpec("p", tuple(TensorSpec(f"t{i}", tuple(shape)) for i in range(names)))
    size = parameter.local_numel(ALONE)
    cuts = sorted({0, size, *(int(edge * size) for edge in edges)})
    count: dict[str, np.ndarray] = {}
    for start, stop in itertools.pairwise(cuts):
        range_boxes = list(shard_slices(parameter, ALONE, Coord(), start, stop))
        assert sum(math.prod(box.size) for box in range_boxes) == stop - start
        assert len(range_boxes) <= names * (2 * len(shape) - 1)
        assert [box.start for box in range_boxes] == sorted(box.start for box in range_boxes)
        fill(parameter, ALONE, Coord(), start, stop, count)
    assert all((times == 1).all() for times in count.values()) and len(count) == names


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), data=st.data())
def test_a_box_holds_the_elements_of_its_range(shape: list[int], data: st.DataObject) -> None:
    parameter = ParamSpec("p", (TensorSpec("t", tuple(shape)),))
    size = math.prod(shape)
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    elements = np.arange(size).reshape(shape)
    for box in shard_slices(parameter, ALONE, Coord(), start, stop):
        place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
        assert elements[place].ravel().tolist() == list(range(box.start, box.start + math.prod(box.size)))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_ranks_of_tp_hold_every_tensor(family: str, tp: int) -> None:
    parameters = all_params(MODELS[family])
    count = covered(parameters, Topology(tp=tp, dp=3))
    expected = {tensor.name: tensor.shape for parameter in parameters for tensor in parameter.parts}
    assert {name: times.shape for name, times in count.items()} == expected
    assert all((times == 1).all() for times in count.values())


@pytest.mark.parametrize("sharding", [{"dp": 0}, {"dp": 0, "tp": 1}, {"tp": 2, "dp": 0}, {"dp": 0, "tp": 0}])
@given(shape=st.tuples(*[st.integers(1, 9)] * 3), multiple=st.integers(1, 4))
def test_axes_other_than_tp_may_shard(sharding: dict[str, int], shape: tuple[int, ...], multiple: int) -> None:
    """Experts [experts, rows, columns], for example, are sharded over dp and over tp."""
    parameter = ParamSpec(
        "p", tuple(TensorSpec(name, shape, sharding, pad_multiple=multiple) for name in ("gate", "up"))
    )
    count = covered([parameter], Topology(tp=2, dp=3, pp=2))
    assert set(count) == {"gate", "up"} and all((times == 1).all() for times in count.values())
