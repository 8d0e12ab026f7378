"""Optimizer steps on a model's parameters with given gradients, in one process and in simulated layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.comm.mesh import Mesh
from megascale.config.run import RunConfig
from megascale.layout.chunks import chunk_buckets, shares_embedding
from megascale.layout.param_groups import ParamGroups
from megascale.layout.tensors import ParamSpec, TensorSpec
from megascale.layout.topology import topology_of
from megascale.ops.wgrad import torch_wgrad
from megascale.optim.sharded import ShardedOptimizer
from megascale.train.build import build_buffers, run_dtypes
from tests.runs import LLAMA, config_of, settings
from tests.thread_world import simulate

SMALL = LLAMA | {"num_layers": 2, "hidden_size": 16, "ffn_size": 24, "num_heads": 4, "vocab_size": 70}

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 zero0": {"parallel__dp": 2, "parallel__zero": 0},
    "dp2 zero1": {"parallel__dp": 2, "parallel__zero": 1},
    "dp4 zero2": {"parallel__dp": 4, "parallel__zero": 2},
    "dp3 zero1 buckets": {"parallel__dp": 3, "parallel__zero": 1, "overlap__bucket_bytes": 4000, "batch__global": 9},
    "tp2": {"parallel__tp": 2},
    "tp2 zero0 dp2": {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 0},
    "tp2 sp dp2": {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2},
    "tp2 dp4 buckets": {"parallel__tp": 2, "parallel__dp": 4, "overlap__bucket_bytes": 4000},
    "tp4 dp2 zero2": {"parallel__tp": 4, "parallel__dp": 2, "parallel__zero": 2, "model__num_kv_heads": 4},
    "pp2": {"parallel__pp": 2},
    "pp2 tp2 dp2": {"parallel__pp": 2, "parallel__tp": 2, "parallel__dp": 2},
    "pp2 vpp2 dp2 zero2": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2, "parallel__zero": 2},
}  # fmt: skip
"""Twelve layouts, the single process left out."""

QUICK = ("dp3 zero1 buckets", "tp2 zero0 dp2", "tp2 sp dp2", "pp2 vpp2 dp2 zero2")
LAYOUT_CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]

STEPS = 4
LR = 1e-2
GO = torch.zeros(())


def configuration(
    folder: Path, optimizer: Mapping[str, Any], model: Mapping[str, Any] = SMALL, **layout: Any
) -> RunConfig:
    """Return a resolved configuration in fp64."""
    keys = {f"optimizer__{key}": value for key, value in optimizer.items()}
    return config_of(settings(dict(model), folder, **{**keys, **layout}), folder)


def drawn(tensor: TensorSpec, salt: int) -> Tensor:
    """Draw a whole tensor by its name."""
    seed = sum(ord(letter) * (31 + place) for place, letter in enumerate(tensor.name)) + 7919 * salt
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / math.sqrt(tensor.shape[-1])


def local(parameter: ParamSpec, mesh: Mesh, salt: int) -> Tensor:
    """Draw a rank's shard of a parameter, with zeros as padding."""
    parts = []
    for tensor in parameter.parts:
        offset, size = tensor.local_box(mesh.topology, mesh.coord)
        shard = torch.zeros(tensor.local_shape(mesh.topology), dtype=torch.float64)
        region = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        shard[tuple(slice(0, n) for n in size)] = drawn(tensor, salt)[region]
        parts.append(shard)
    return torch.cat(parts)


class Trained:
    """A rank's optimizer after steps with drawn gradients."""

    def __init__(self, mesh: Mesh, config: RunConfig, steps: int = STEPS, skipped: Sequence[int] = ()) -> None:
        chunks = chunk_buckets(config.model, config.parallel, config.overlap, config.train, mesh.coord.pp)
        buffers = build_buffers(
            chunks, mesh, config.parallel, run_dtypes(config.train.precision),
            torch.device("cpu"), torch_wgrad, overlap=config.overlap.dp,
        )  # fmt: skip
        for bucket in buffers.buckets:
            for slot in bucket.layout.slots:
                bucket.parameters[slot.parameter.name].data.copy_(local(slot.parameter, mesh, 0))
        rules = {name: OPTIMIZERS[name].load() for name in ParamGroups(config.optimizer).rules}
        self.config = config
        self.buffers, self.optimizer = buffers, ShardedOptimizer(buffers.buckets, mesh, config.optimizer, rules)
        for step in range(1, steps + 1):
            self.step(mesh, step, step in skipped)

    def step(self, mesh: Mesh, step: int, skip: bool = False) -> None:
        """Take a step; gradients are those after the reductions, in this rank's shard."""
        for bucket in self.buffers.buckets:
            full = torch.zeros(bucket.layout.numel, dtype=torch.float64)
            for slot in bucket.layout.slots:
                full[slot.start : slot.stop] = local(slot.parameter, mesh, step).view(-1)
            bucket.grad.copy_(full[slice(*bucket.shard)] * (math.nan if skip else 1.0))
        one = torch.ones((), dtype=torch.float64)
        clipping = self.optimizer.compute_clipping(one * (math.nan if skip else 0.04), one, one)
        self.optimizer.compute_updates(clipping, LR, step)
        for index, bucket in enumerate(self.buffers.buckets):
            self.optimizer.update_shard(index, clipping, LR, step)
            self.buffers.start_param_gather(bucket)
        self.buffers.finish_param_gather()

    def tensors(self) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]]:
        """Return this rank's shards of weights and state by global name: shape, offset and values."""
        return {
            name: [(tensor.shape, shard.offset, shard.data) for shard in tensor.shards]
            for name, tensor in self.optimizer.global_tensors().items()
        }


def state_after(config: RunConfig, steps: int = STEPS, skipped: Sequence[int] = ()) -> dict[str, Tensor]:
    """Train in a simulated layout, and assemble weights and state by global name."""

    def body(mesh: Mesh) -> Any:
        return Trained(mesh, config, steps, skipped).tensors()

    return assembled(simulate(topology_of(config.parallel), body, tied=shares_embedding(config.model, config.parallel)))


def assembled(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Assemble the shards of all ranks; replicas are equal bit for bit."""
    whole: dict[str, Tensor] = {}
    for rank in ranks:
        for name, shards in rank.items():
            for shape, offset, values in shards:
                known = whole.setdefault(name, torch.full(shape, math.nan, dtype=torch.float64))
                values = values.double()
                region = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
                old = known[region]
                assert bool((old.isnan() | (old == values)).all()), f"replicas of {name} differ"
                known[region] = values
    assert not [name for name, values in whole.items() if values.isnan().any()]
    return whole


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the largest difference of any tensor, relative to its largest element."""
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-30)) for name in ours
    )
