"""Buckets: room for every parameter, equal shards, and what is treated alike side by side."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config.model import ModelConfig
from megascale.layout.buckets import ALIGNMENT, pack
from megascale.layout.tensors import TOKEN_EMBEDDING, Tensor, matrix, stage, whole
from megascale.layout.topology import Topology
from tests.runs import GPT, LLAMA

MODELS = {"gpt": ModelConfig(**GPT), "llama": ModelConfig(**LLAMA)}


@pytest.mark.parametrize("family", MODELS)
@given(tp=st.sampled_from([1, 2]), cp=st.integers(1, 2), dp=st.integers(1, 7))
@settings(max_examples=20)
def test_a_bucket_has_room_for_all_and_equal_shards(family: str, tp: int, cp: int, dp: int) -> None:
    parameters, topology = stage(MODELS[family], range(2), first=True, last=False), Topology(tp, cp, dp)
    bucket = pack(parameters, topology)
    assert {slot.parameter.name for slot in bucket.slots} == {parameter.name for parameter in parameters}
    assert bucket.axes == ("cp", "dp") and bucket.shards == cp * dp
    assert bucket.size % bucket.shards == 0
    at = 0
    for slot in bucket.slots:
        assert slot.start >= at and slot.start % ALIGNMENT == 0
        assert slot.stop - slot.start == slot.parameter.local_numel(topology)
        assert ("tp" not in slot.parameter.sharding) == (bucket.whole[0] <= slot.start < bucket.whole[1])
        at = slot.stop
    assert bucket.size - at < ALIGNMENT * (bucket.shards + 1)
    ranges = [bucket.shard(index) for index in range(bucket.shards)]
    assert [edge for pair in ranges for edge in pair][1:-1:2] == [start for start, _ in ranges[1:]]


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("excluded", ["", TOKEN_EMBEDDING])
@given(shards=st.integers(1, 5))
def test_runs_of_the_same_treatment_cover_a_shard(family: str, excluded: str, shards: int) -> None:
    parameters = [replace(p, weight_decay=p.weight_decay and p.name != excluded) for p in whole(MODELS[family])]
    bucket = pack(parameters, Topology(dp=shards))
    flags = np.full((bucket.size, 2), -1)
    for index in range(shards):
        runs = [(slot.parameter, start, stop) for slot, start, stop in bucket.runs(*bucket.shard(index))]
        for parameter, start, stop in runs:
            assert (flags[start:stop] == -1).all()
            flags[start:stop] = parameter.is_matrix, parameter.weight_decay
        treatments = [(parameter.is_matrix, parameter.weight_decay) for parameter, *_ in runs]
        assert all(one != other for one, other in pairwise(treatments)), "runs are as long as can be"
    assert (flags >= 0).all()
    for slot in bucket.slots:
        assert (flags[slot.start : slot.stop] == [slot.parameter.is_matrix, slot.parameter.weight_decay]).all()


def test_what_data_parallelism_shards_is_reduced_over_what_is_left_of_it() -> None:
    """Experts that dp shards have their gradient summed over cp alone, in buckets of their own."""
    experts = matrix("experts", Tensor("experts", (8, 64, 32), {"dp": 0, "tp": 1}))
    bucket = pack([experts], Topology(tp=2, cp=2, dp=4))
    assert (bucket.axes, bucket.shards, bucket.size) == (("cp",), 2, 2 * 32 * 32)
    with pytest.raises(AssertionError, match="one group reduces a bucket"):
        pack([experts, *whole(MODELS["gpt"])], Topology())
