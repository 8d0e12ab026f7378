"""Tensors, parameters, buckets and their boxes: every number of the model is in exactly one place."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config.model import ModelConfig
from megascale.layout.buckets import ALIGNMENT, pack
from megascale.layout.shards import boxes
from megascale.layout.tensors import Parameter, Tensor, embedding, head, layer, padded_vocab, stage, whole
from tests.runs import GPT, LLAMA

MODELS = {"gpt": ModelConfig(**GPT), "llama": ModelConfig(**LLAMA)}


def fill(parameter: Parameter, rank: int, tp: int, start: int, stop: int, count: dict[str, np.ndarray]) -> None:
    """Add one to every number of the global tensors that the boxes of a range cover."""
    for box in boxes(parameter, rank, tp, start, stop):
        shape = next(tensor.shape for tensor in parameter.tensors if tensor.name == box.name)
        place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
        count.setdefault(box.name, np.zeros(shape, dtype=int))[place] += 1


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    edges=st.lists(st.floats(0, 1), min_size=0, max_size=4),
    names=st.integers(1, 3),
)
def test_any_cuts_of_a_flat_parameter_cover_it_once(shape: list[int], edges: list[float], names: int) -> None:
    parameter = Parameter("p", tuple(Tensor(f"t{i}", tuple(shape)) for i in range(names)))
    size = parameter.local_numel(1)
    cuts = sorted({0, size, *(int(edge * size) for edge in edges)})
    count: dict[str, np.ndarray] = {}
    for start, stop in pairwise(cuts):
        found = list(boxes(parameter, 0, 1, start, stop))
        assert sum(math.prod(box.size) for box in found) == stop - start
        assert len(found) <= names * (2 * len(shape) - 1)
        assert [box.start for box in found] == sorted(box.start for box in found)
        fill(parameter, 0, 1, start, stop, count)
    assert all((numbers == 1).all() for numbers in count.values()) and len(count) == names


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), data=st.data())
def test_a_box_holds_the_numbers_that_its_range_does(shape: list[int], data: st.DataObject) -> None:
    parameter = Parameter("p", (Tensor("t", tuple(shape)),))
    size = math.prod(shape)
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    numbers = np.arange(size).reshape(shape)
    for box in boxes(parameter, 0, 1, start, stop):
        place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
        assert numbers[place].ravel().tolist() == list(range(box.start, box.start + math.prod(box.size)))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_ranks_of_tp_hold_every_tensor(family: str, tp: int) -> None:
    count: dict[str, np.ndarray] = {}
    model = MODELS[family]
    for parameter in stage(model, tp, range(model.num_layers), first=True, last=True):
        for rank in range(tp if parameter.split is not None else 1):
            fill(parameter, rank, tp, 0, parameter.local_numel(tp), count)
    expected = {tensor.name: tensor.shape for parameter in whole(model) for tensor in parameter.tensors}
    assert {name: numbers.shape for name, numbers in count.items()} == expected
    assert all((numbers == 1).all() for numbers in count.values())


@pytest.mark.parametrize("family", MODELS)
@given(tp=st.sampled_from([1, 2]), shards=st.integers(1, 7))
@settings(max_examples=20)
def test_a_bucket_has_room_for_all_and_equal_shards(family: str, tp: int, shards: int) -> None:
    parameters = stage(MODELS[family], tp, range(2), first=True, last=False)
    bucket = pack(parameters, tp, shards)
    assert {slot.parameter.name for slot in bucket.slots} == {parameter.name for parameter in parameters}
    assert bucket.size % shards == 0
    at = 0
    for slot in bucket.slots:
        assert slot.start >= at and slot.start % ALIGNMENT == 0
        assert slot.stop - slot.start == slot.parameter.local_numel(tp)
        assert (slot.parameter.split is None) == (bucket.whole[0] <= slot.start < bucket.whole[1])
        at = slot.stop
    assert bucket.size - at < ALIGNMENT * (shards + 1)
    ranges = [bucket.shard(index) for index in range(shards)]
    assert [edge for pair in ranges for edge in pair][1:-1:2] == [start for start, _ in ranges[1:]]


@pytest.mark.parametrize("family", MODELS)
@given(shards=st.integers(1, 5))
def test_runs_of_decay_cover_a_shard(family: str, shards: int) -> None:
    bucket = pack(whole(MODELS[family]), 1, shards)
    decays = np.full(bucket.size, -1)
    for index in range(shards):
        for start, stop, decay in bucket.runs(*bucket.shard(index)):
            assert (decays[start:stop] == -1).all()
            decays[start:stop] = decay
    assert (decays >= 0).all()
    for slot in bucket.slots:
        assert (decays[slot.start : slot.stop] == slot.parameter.decays).all()


def test_norms_and_biases_do_not_decay() -> None:
    names = {parameter.name: parameter.decays for parameter in whole(MODELS["gpt"])}
    assert not any(decays for name, decays in names.items() if "norm" in name or name.endswith("bias"))
    assert all(decays for name, decays in names.items() if name.endswith("weight") and "norm" not in name)


def test_a_tied_head_is_the_embedding() -> None:
    assert [p.name for p in head(MODELS["gpt"], 1)][-1] == embedding(MODELS["gpt"], 1)[0].name
    assert [p.name for p in head(MODELS["llama"], 1)][-1] == "head.weight"
    assert len(whole(MODELS["gpt"])) == len({parameter.name for parameter in whole(MODELS["gpt"])})


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(50_257, 1, 50_304), (50_257, 8, 50_688), (64_000, 8, 64_000)])
def test_vocabulary_padding(vocab: int, tp: int, padded: int) -> None:
    assert padded_vocab(ModelConfig(**GPT | {"vocab_size": vocab}), tp) == padded


def test_qkv_and_gate_up_are_one_matrix_of_named_parts() -> None:
    parameters = {p.name: p for p in layer(MODELS["llama"], 3)}
    qkv = parameters["layers.3.attention.qkv.weight"]
    assert [tensor.name for tensor in qkv.tensors] == [f"layers.3.attention.{part}.weight" for part in "qkv"]
    assert qkv.local_shape(2) == ((32 + 16 + 16) // 2, 32)
    gate_up = parameters["layers.3.mlp.gate_up.weight"]
    assert gate_up.local_shape(2) == (48, 32)
    assert parameters["layers.3.mlp.down.weight"].local_shape(2) == (32, 24)
