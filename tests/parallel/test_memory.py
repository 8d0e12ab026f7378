"""Bytes of weights, gradients and optimizer state equal the formulas."""

from __future__ import annotations

from typing import Any

import pytest

from megascale.layout.buckets import pack
from megascale.layout.chunks import chunk_buckets
from megascale.layout.topology import Topology
from megascale.plan.account.memory import JobMemory
from megascale.plan.account.state_bytes import state_bytes
from tests.runs import FAMILIES, config_of, settings
from tests.thread_world import run_threads


def allocated(run: Any) -> dict[str, int]:
    """Measure a rank's bytes of weights, gradients and optimizer after a step, and the step's peak of full gradients,
    without and with the shards that are being reduced.
    """
    from megascale.train.step import train_step

    peak = peak_with_shards = chunks = 0
    acquire = run.buffers._acquire_gradients

    def watch() -> None:
        nonlocal peak, peak_with_shards, chunks
        chunks = max(chunks, len({bucket.chunk for bucket in run.buffers._in_reduction}))
        full = sum(b.storage.full_grad.nbytes for b in run.buffers.buckets if b.storage.full_grad is not None)
        shards = sum(x.nbytes for b in run.buffers.buckets if (x := getattr(b.storage, "arriving", None)) is not None)
        peak, peak_with_shards = max(peak, full), max(peak_with_shards, full + shards)

    run.buffers._acquire_gradients = lambda buckets: (acquire(buckets), watch())
    train_step(run, run.train_loader.batch(0))
    run.buffers.finish_param_gather()
    buckets, shards = run.buffers.buckets, run.optimizer.shards
    return {
        "weights": sum(bucket.weights.nbytes for bucket in buckets),
        "gradients": sum(bucket.grad.untyped_storage().nbytes() for bucket in buckets),
        "optimizer": sum(shard.bytes for shard in shards),
        "full gradients": peak,
        "full gradients and shards": peak_with_shards,
        "chunks being reduced": chunks,
    }


@pytest.mark.parametrize("family", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_allocated_bytes_equal_the_plan(family: str, precision: str, zero: int, tmp_path: Any) -> None:
    layout = {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": zero}
    tree = settings(FAMILIES[family], tmp_path, train__precision=precision, **layout)
    config = config_of(tree, tmp_path)
    for rank, measured in enumerate(run_threads(config, allocated)):
        planned = state_bytes(config, rank // 2)
        assert measured["weights"] == planned.parameters
        assert measured["gradients"] == planned.gradients
        assert measured["optimizer"] == planned.optimizer
        if zero == 2:
            assert (
                measured["full gradients"]
                < measured["full gradients and shards"]
                <= JobMemory(config).rank(rank // 2).transient
            )


def test_a_full_gradient_is_allocated_during_the_reduction_of_another(tmp_path: Any) -> None:
    layout = {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 2}
    tree = settings(FAMILIES["gpt"], tmp_path, train__precision="fp32", overlap__bucket_bytes=60_000, **layout)
    config = config_of(tree, tmp_path)
    assert [
        len(buckets) for buckets in chunk_buckets(config.model, config.parallel, config.overlap, config.train, 0)
    ] == [2, 1], "chunk 0 needs two buckets"
    assert [measured["chunks being reduced"] for measured in run_threads(config, allocated)] == [1, 1, 1, 1]


def test_the_heads_full_gradient_coexists_with_other_chunks(tmp_path: Any) -> None:
    """Groups of three and two micro-batches: another chunk's backward comes between a loss and its backward."""
    layout = {"parallel__pp": 2, "parallel__vpp": 2, "parallel__zero": 2, "batch__global": 5}
    config = config_of(settings(FAMILIES["llama"], tmp_path, train__precision="fp32", **layout), tmp_path)
    measured, planned = run_threads(config, allocated)[1]["full gradients"], JobMemory(config).rank(1)
    chunks = [
        sum(4 * pack(bucket, Topology()).numel for bucket in chunk)
        for chunk in chunk_buckets(config.model, config.parallel, config.overlap, config.train, 1)
    ]
    assert measured == sum(chunks)  # the last chunk is one bucket
    assert measured + max(chunks) <= planned.transient, "another bucket is being reduced"


@pytest.mark.parametrize(("precision", "per_parameter"), [("fp32", 16), ("bf16", 18)])
def test_the_formula_for_one_rank(precision: str, per_parameter: int, tmp_path: Any) -> None:
    config = config_of(settings(FAMILIES["llama"], tmp_path, train__precision=precision, parallel__zero=0), tmp_path)
    (bucket,) = chunk_buckets(config.model, config.parallel, config.overlap, config.train, 0)[0]
    numbers = pack(bucket, Topology()).numel
    assert state_bytes(config, 0).total == per_parameter * numbers


def test_each_zero_stage_divides_its_state_by_dp(tmp_path: Any) -> None:
    def planned(zero: int, dp: int) -> Any:
        layout = {"parallel__dp": dp, "parallel__zero": zero, "train__precision": "bf16"}
        return state_bytes(config_of(settings(FAMILIES["llama"], tmp_path, **layout), tmp_path), 0)

    replicated = planned(0, 8)
    assert planned(1, 8).optimizer * 8 == pytest.approx(replicated.optimizer, rel=0.05)  # except for shard padding
    assert planned(2, 8).gradients * 8 == pytest.approx(replicated.gradients, rel=0.05)
    assert planned(1, 8).gradients == planned(1, 8).parameters * 2
