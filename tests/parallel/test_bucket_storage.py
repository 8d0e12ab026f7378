"""Storages of buckets: sums over the declared ranks, in every placement, and what a rank keeps of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.comm.mesh import Mesh
from megascale.layout.buckets import SHARDED
from megascale.layout.tensors import ParamSpec, TensorSpec
from megascale.layout.topology import DATA_AXES, Topology
from megascale.parallel.bucket_storage import Replicated, Sharded, ShardedAll, ShardedEach
from megascale.parallel.grad_accumulation import accumulate_grad
from megascale.parallel.param_and_grad_buffers import BucketCommunication, ParamAndGradBuffers
from tests.thread_world import simulate

TOPOLOGY = Topology(cp=2, dp=2, tp=2)
HYBRID = Topology(tp=2, dp=4, ep=2, dp_replicate=2)
STORAGES = {0: Replicated, 1: Sharded, 2: ShardedEach, 3: ShardedAll}
ROUNDS = 2


def parameter(name: str, sharding: dict[str, int], reduce_axes: tuple[str, ...]) -> ParamSpec:
    part = TensorSpec(name, (8, 64), sharding)
    return ParamSpec(name, (part,), reduce_axes=reduce_axes)


DENSE = parameter("layers.0.mlp.up.weight", {"tp": 0}, DATA_AXES)
EXPERTS = parameter("layers.0.experts.weight", {"dp": 0, "tp": 1}, ("cp",))
"""A parameter of which the ranks along dp hold different parts."""

OF_EDP = parameter("layers.0.experts.weight", {"ep": 0}, ("edp",))
"""A parameter of which the ranks along ep hold different parts."""


def buffers_of(mesh: Mesh, zero: int) -> ParamAndGradBuffers:
    dtypes, experts = (torch.float64, torch.float64), EXPERTS if mesh.topology.ep == 1 else OF_EDP
    return ParamAndGradBuffers(
        [[[DENSE], [experts]]], mesh, zero=zero, sequence=False, communication=BucketCommunication(True),
        dtypes=dtypes, device=torch.device("cpu"),
    )  # fmt: skip


def gradient(rank: int, step: int, parameter: Tensor) -> Tensor:
    """Return a rank's gradient in a backward, of distinct elements."""
    return torch.arange(parameter.numel(), dtype=parameter.dtype).view_as(parameter) + 1000 * rank + 10 * step


PLACED = [(zero, TOPOLOGY) for zero in (0, 1, 2)] + [(zero, HYBRID) for zero in (1, 2, 3)]
PLACED.append((3, replace(HYBRID, state_over_all=True)))


@pytest.mark.parametrize(("zero", "topology"), PLACED)
def test_each_bucket_sums_over_its_own_ranks(zero: int, topology: Topology) -> None:
    def body(mesh: Mesh) -> None:
        buffers = buffers_of(mesh, zero)
        buffers.begin_step()
        for step in range(ROUNDS):
            last = zero >= 2 or step == ROUNDS - 1
            with buffers.backward(0, last=last):
                for bucket in buffers.buckets:
                    (weight,) = bucket.parameters.values()
                    accumulate_grad(weight, gradient(mesh.rank, step, weight))
            if last:
                buffers.start_chunk_reduction(0)
        for bucket in buffers.finish_reductions():
            (weight,) = bucket.parameters.values()
            ranks = mesh.topology.group(mesh.rank, *bucket.layout.reduce_axes)
            full = torch.zeros(bucket.layout.numel, dtype=torch.float64)
            full[: weight.numel()] = sum(gradient(r, s, weight) for r in ranks for s in range(ROUNDS)).view(-1)
            assert torch.equal(bucket.grad, full[slice(*bucket.shard)])
            assert isinstance(bucket.storage, STORAGES[zero])
            assert (bucket.storage.full_grad is None) == ("gradient" in SHARDED[zero])
            shards = mesh.topology.size(*bucket.layout.shard_axes.state)
            assert len(bucket.grad) * shards == len(full)
            copies = 1 if topology.state_over_all else topology.dp_replicate
            assert shards == (len(ranks) // copies if "state" in SHARDED[zero] else 1)

    simulate(topology, body)


@pytest.mark.parametrize(("zero", "topology"), PLACED)
def test_updated_weights_reach_the_ranks_that_hold_them(zero: int, topology: Topology) -> None:
    def body(mesh: Mesh) -> list[Any]:
        buffers = buffers_of(mesh, zero)
        for bucket in buffers.buckets:
            start, stop = bucket.shard
            bucket.storage.shard_weights.copy_(torch.arange(start, stop))
            buffers.start_param_gather(bucket)
        buffers.finish_param_gather()
        gathered = list[Tensor]()
        for bucket in buffers.buckets:
            gathered.append(bucket.weights)
            if isinstance(bucket.storage, ShardedAll):
                memory = bucket.weights.new_empty(bucket.sharded.gathered_bytes, dtype=torch.uint8)
                for work in bucket.sharded.gather_into(memory):
                    work.wait()
                gathered[-1] = bucket.sharded.views(memory)[1]
        held = [(bucket.storage.share, bucket.layout.numel) for bucket in buffers.buckets]
        return [(whole, *of_rank) for whole, of_rank in zip(gathered, held, strict=True)]

    ranks = simulate(topology, body)
    for bucket in range(2):
        assert all(torch.equal(held[bucket][0], torch.arange(held[bucket][2]).double()) for held in ranks)
    shares = [{held[bucket][1] for held in ranks} for bucket in range(2)]
    count = [4, 2 if topology.ep == 1 else 4]
    assert [len(found) for found in shares] == count, "the ranks that reduce a bucket share its reads and writes"
    assert all(sum(b - a for a, b in found) == ranks[0][index][2] for index, found in enumerate(shares))
