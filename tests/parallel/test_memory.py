"""Bytes of weights, gradients and optimizer are those of the formulas."""

from __future__ import annotations

from typing import Any

import pytest

from megascale.account.memory import rank_memory, state_bytes
from megascale.core.rank import Rank
from megascale.layout.buckets import pack
from megascale.layout.chunks import chunk_buckets
from megascale.layout.topology import Topology
from tests.runs import FAMILIES, build_run, config_of, settings
from tests.worlds import run_world


def allocated(rank: Rank, config: Any) -> dict[str, int]:
    """Bytes of a rank's weights, gradients and optimizer after a step, and the most that whole gradients held in it,
    without and with the shards that reductions give.
    """
    from megascale.train.step import train_step

    run = build_run(rank, config)
    most = room = chunks = 0
    begin_loss, begin_backward = run.gradients.begin_loss, run.gradients.begin_backward

    def watch() -> None:
        nonlocal most, room, chunks
        chunks = max(chunks, len({bucket.chunk for bucket in run.gradients._reducing}))
        whole = sum(b._full.nbytes for b in run.gradients.buckets if b._full is not None)
        shards = sum(b._reducing[1].nbytes for b in run.gradients.buckets if b._reducing[1] is not None)
        most, room = max(most, whole), max(room, whole + shards)

    run.gradients.begin_loss = lambda chunk: (begin_loss(chunk), watch())
    run.gradients.begin_backward = lambda chunk, *, last: (begin_backward(chunk, last=last), watch())
    train_step(run, run.train.batch(0))
    run.gradients.finish_gather()
    buckets, shards = run.gradients.buckets, run.optimizer.shards
    return {
        "weights": sum(bucket.bytes["weights"] for bucket in buckets),
        "gradients": sum(bucket.bytes["gradients"] for bucket in buckets),
        "optimizer": sum(shard.bytes for shard in shards),
        "whole gradients": most,
        "room for reductions": room,
        "chunks being reduced": chunks,
    }


@pytest.mark.parametrize("family", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_allocated_as_planned(family: str, precision: str, zero: int, tmp_path: Any) -> None:
    layout = {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": zero}
    tree = settings(FAMILIES[family], tmp_path, train__precision=precision, **layout)
    config = config_of(tree, tmp_path)
    for rank, found in enumerate(run_world(4, allocated, config)):
        planned = state_bytes(config, rank // 2)
        assert found["weights"] == planned.parameters
        assert found["gradients"] == planned.gradients
        assert found["optimizer"] == planned.optimizer
        if zero == 2:
            assert found["whole gradients"] < found["room for reductions"] <= rank_memory(config, rank // 2).transient


def test_the_gradient_of_one_chunk_is_being_reduced_while_room_is_made_for_another(tmp_path: Any) -> None:
    layout = {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 2}
    tree = settings(FAMILIES["gpt"], tmp_path, train__precision="fp32", overlap__bucket_bytes=60_000, **layout)
    config = config_of(tree, tmp_path)
    assert [len(buckets) for buckets in chunk_buckets(config, 0)] == [2, 1], "or what is left of one may hide another"
    assert [found["chunks being reduced"] for found in run_world(4, allocated, config)] == [1, 1, 1, 1]


def test_room_for_the_head_while_other_chunks_have_theirs(tmp_path: Any) -> None:
    """Groups of three and two micro-batches: a backward of another chunk comes between the loss and its own."""
    layout = {"parallel__pp": 2, "parallel__vpp": 2, "parallel__zero": 2, "batch__global": 5}
    config = config_of(settings(FAMILIES["llama"], tmp_path, train__precision="fp32", **layout), tmp_path)
    found, planned = run_world(2, allocated, config)[1]["whole gradients"], rank_memory(config, 1)
    chunks = [sum(4 * pack(bucket, Topology()).size for bucket in chunk) for chunk in chunk_buckets(config, 1)]
    assert found == sum(chunks)  # the last chunk is one bucket
    assert found + max(chunks) <= planned.transient, "and one more is being reduced"


@pytest.mark.parametrize(("precision", "per_parameter"), [("fp32", 16), ("bf16", 18)])
def test_the_formula_for_one_rank(precision: str, per_parameter: int, tmp_path: Any) -> None:
    from megascale.layout.chunks import chunk_parameters

    config = config_of(settings(FAMILIES["llama"], tmp_path, train__precision=precision, parallel__zero=0), tmp_path)
    numbers = pack(chunk_parameters(config, 0)[0], Topology()).size
    assert state_bytes(config, 0).total == per_parameter * numbers


def test_sharding_divides_what_it_says(tmp_path: Any) -> None:
    def planned(zero: int, dp: int) -> Any:
        layout = {"parallel__dp": dp, "parallel__zero": zero, "train__precision": "bf16"}
        return state_bytes(config_of(settings(FAMILIES["llama"], tmp_path, **layout), tmp_path), 0)

    whole = planned(0, 8)
    assert planned(1, 8).optimizer * 8 == pytest.approx(whole.optimizer, rel=0.05)  # up to the padding of shards
    assert planned(2, 8).gradients * 8 == pytest.approx(whole.gradients, rel=0.05)
    assert planned(1, 8).gradients == planned(1, 8).parameters * 2
