"""Buckets hold every parameter, have equal shards, and keep parameters with equal flags contiguous."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config.model import ModelConfig
from megascale.layout.buckets import ALIGNMENT, ShardAxes, pack, split_by_reduction
from megascale.layout.parameters import all_params, stage_params
from megascale.layout.tensors import TOKEN_EMBEDDING, ParamSpec, TensorSpec
from megascale.layout.topology import Topology, inner_axes
from tests.runs import GPT, LLAMA

MODELS = {"gpt": ModelConfig(**GPT), "llama": ModelConfig(**LLAMA)}


@pytest.mark.parametrize("family", MODELS)
@given(tp=st.sampled_from([1, 2]), cp=st.integers(1, 2), dp=st.integers(1, 7))
@settings(max_examples=20)
def test_a_bucket_holds_all_parameters_and_has_equal_shards(family: str, tp: int, cp: int, dp: int) -> None:
    parameters, topology = stage_params(MODELS[family], range(2), first=True, last=False), Topology(tp, cp, dp)
    bucket = pack(parameters, topology)
    assert {slot.parameter.name for slot in bucket.slots} == {parameter.name for parameter in parameters}
    assert bucket.reduce_axes == ("cp", "dp") and bucket.num_shards == cp * dp
    assert bucket.numel % bucket.num_shards == 0
    at = 0
    for slot in bucket.slots:
        assert slot.start >= at and slot.start % ALIGNMENT == 0
        assert slot.stop - slot.start == slot.parameter.local_numel(topology)
        assert ("tp" not in slot.parameter.sharding) == (bucket.replicated[0] <= slot.start < bucket.replicated[1])
        at = slot.stop
    assert bucket.numel - at < ALIGNMENT * (bucket.num_shards + 1)
    ranges = [bucket.shard_range(index) for index in range(bucket.num_shards)]
    assert [edge for pair in ranges for edge in pair][1:-1:2] == [start for start, _ in ranges[1:]]


@pytest.mark.parametrize("family", MODELS)
def test_replicas_with_partial_gradients_are_a_range(family: str) -> None:
    """Gains of norms over each head; gains over all heads are sharded."""
    norm = {"norm": "rmsnorm", "bias": family == "gpt"}
    for qk_norm, count in (("none", 0), ("head", 4), ("full", 0)):
        model = ModelConfig(**(GPT if family == "gpt" else LLAMA) | norm | {"qk_norm": qk_norm})
        bucket = pack(stage_params(model, range(2), first=True, last=True), Topology(tp=2))
        low, high = bucket.summed_over_tp(sequence=False)
        partial = [slot.parameter.name for slot in bucket.slots if low <= slot.start < high]
        assert len(partial) == count and all(name.endswith(("q_norm.weight", "k_norm.weight")) for name in partial)
        start, stop = bucket.summed_over_tp(sequence=True)
        assert start == low <= high <= stop == bucket.replicated[1]
        replicated = {slot.parameter.name for slot in bucket.slots if "tp" not in slot.parameter.sharding}
        assert replicated == {slot.parameter.name for slot in bucket.slots if start <= slot.start < stop}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("excluded", ["", TOKEN_EMBEDDING])
@given(shards=st.integers(1, 5))
def test_merged_ranges_cover_a_shard(family: str, excluded: str, shards: int) -> None:
    parameters = [replace(p, decays=p.name != excluded) for p in all_params(MODELS[family])]
    bucket = pack(parameters, Topology(dp=shards))
    flags = np.full((bucket.numel, 2), -1)
    for index in range(shards):
        ranges = bucket.merged_ranges(*bucket.shard_range(index))
        runs = [(item.slot.parameter, item.start, item.stop) for item in ranges]
        for parameter, start, stop in runs:
            assert (flags[start:stop] == -1).all()
            flags[start:stop] = parameter.is_matrix, parameter.weight_decay
        run_flags = [(parameter.is_matrix, parameter.weight_decay) for parameter, *_ in runs]
        assert all(flags != next_flags for flags, next_flags in pairwise(run_flags)), "ranges are maximal"
    assert (flags >= 0).all()
    for slot in bucket.slots:
        assert (flags[slot.start : slot.stop] == [slot.parameter.is_matrix, slot.parameter.weight_decay]).all()


EXPERTS = ParamSpec(
    "layers.0.experts", (TensorSpec("layers.0.experts", (8, 64, 32), {"dp": 0, "tp": 1}),),
    reduce_axes=("cp",),
)  # fmt: skip


def test_parameters_sharded_over_dp_are_reduced_over_cp() -> None:
    """The gradients of experts sharded over dp are reduced over cp alone, in separate buckets."""
    bucket = pack([EXPERTS], Topology(tp=2, cp=2, dp=4))
    assert (bucket.reduce_axes, bucket.num_shards, bucket.numel) == (("cp",), 2, 2 * 32 * 32)
    dense = all_params(MODELS["gpt"])
    with pytest.raises(AssertionError, match="the gradients of a bucket have a common reduction group"):
        pack([EXPERTS, *dense], Topology())
    assert split_by_reduction([*dense[:3], EXPERTS, *dense[3:]]) == [dense, [EXPERTS]]


def test_placements_by_stage_of_zero() -> None:
    """The axes that reduce a bucket shard what a row of the table lists, and replicate the rest."""
    data, both = (
        ("cp", "dp"),
        [pack([parameter], Topology(), 1) for parameter in (EXPERTS, all_params(MODELS["gpt"])[0])],
    )
    assert [bucket.shard_axes.state for bucket in both] == [("cp",), data]
    layouts = [pack(all_params(MODELS["gpt"]), Topology(), zero) for zero in range(3)]
    assert [layout.shard_axes for layout in layouts] == [((), (), ()), ((), (), data), ((), data, data)]
    assert [layout.replica_axes for layout in layouts] == [data, (), ()]
    assert [replace(layout, shard_axes=ShardAxes()) for layout in layouts] == layouts[:1] * 3


@pytest.mark.parametrize("ep", [1, 4])
def test_placements_of_hybrid_sharding(ep: int) -> None:
    """State of a rank is a part of its weights; state of the groups with copies is equal, or together the bucket."""
    whole = Topology(tp=2, dp=8, ep=ep)
    hybrid = replace(whole, dp_replicate=2)
    for parameters in (all_params(MODELS["gpt"]), [replace(EXPERTS, reduce_axes=("edp",))]):
        flat = pack(parameters, whole, 3)
        inner, axes = inner_axes(flat.reduce_axes), flat.reduce_axes
        for zero, over_all in ((1, False), (2, False), (3, False), (3, True)):
            layout = pack(parameters, replace(hybrid, state_over_all=over_all), zero)
            assert (layout.slots, layout.numel) == (flat.slots, flat.numel)
            assert layout.shard_axes.state == (axes if over_all else inner) and layout.inner_axes == inner
            assert layout.shard_axes[:2] == ((inner if zero == 3 else ()), (inner if zero > 1 else ()))
            assert layout.replica_axes == (() if over_all else ("dp_replicate",))
            ranges = [layout.state_range(index) for index in range(hybrid.size(*layout.shard_axes.state))]
            assert all(before[1] == after[0] for before, after in pairwise(sorted(ranges)))
            assert (min(ranges)[0], max(ranges)[1]) == (0, layout.numel)
            for index, (start, stop) in enumerate(ranges):
                low, high = layout.shard_range(index % hybrid.size(*inner), hybrid.size(*inner))
                assert low <= start < stop <= high and (over_all or (start, stop) == (low, high))
