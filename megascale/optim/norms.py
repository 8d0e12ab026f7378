"""Updates with L2 norms of whole parameters, for trust ratios: q, k and v, and gate and up, each have their own.

A matrix belongs to one pipeline stage. Within the stage it is sharded or replicated over tp, and with zero >= 1 sharded
over dp. The sums of squares of all matrices of the stage are all-reduced over both axes at once. Every expert has norms
of its own: ranks along ep have different experts, whose sums are all-reduced over edp alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.comm.mesh import Mesh
from megascale.layout.buckets import SlotRange
from megascale.ops.optimizer import NeedsParamNorms
from megascale.optim.clipping import Clipping, sums_of_squares
from megascale.optim.optimizer_shard import OptimizerShard
from megascale.optim.updates import Parts, Updates

Axes = tuple[str, ...]


@dataclass(frozen=True)
class _ShardParams:
    """The matrices in a shard: their positions among the stage's, and the weights and updates that this rank adds to
    the sums, a prefix of the matrices.
    """

    positions: slice
    weights: list[Tensor]
    updates: list[Tensor]


class NormUpdates(Updates):
    """The rule of all parameters, a `NeedsParamNorms` class, for every shard. It overwrites gradients with updates.

    `norms`: [2, matrices of this rank's buckets], f64, of weights and updates of the last step; equal on all ranks that
    hold a matrix.
    """

    norms: Tensor

    def __init__(self, parts: Parts) -> None:
        shards, mesh = self._shards, self._mesh = parts.shards, parts.mesh
        rule = cast(type[NeedsParamNorms], parts.rules[parts.config.name])
        self._rules = []
        for shard in shards:  # a segment for each tensor with elements in a shard, without padding after parameters
            ranges = shard.bucket.layout.matrix_ranges(*shard.bucket.shard, mesh.topology)
            self._rules.append(rule([shard.segment(item) for item in ranges], parts.config))
        self._shard_params: list[_ShardParams] = []
        self._tied = slice(0)  # position of a tied embedding, shared by the first and last stages
        self._count = 0
        positions = defaultdict[tuple[Axes, ...], list[int]](list)  # by the axes whose ranks have parts of the matrices
        for shard in shards:
            matrices = _matrices(shard, (0, shard.bucket.layout.numel), mesh)
            self._shard_params.append(_shard_params(shard, matrices, self._count, mesh))
            count = len(matrices)
            if shard.bucket.tied:
                self._tied = slice(self._count, self._count + count)
            layout = shard.bucket.layout
            axes = (layout.shard_axes.state,) if layout.has_experts else (("tp",), layout.shard_axes.state)
            positions[axes] += range(self._count, self._count + count)
            self._count += count
        self._reductions = [
            (torch.tensor(found, device=shards[0].master.device), [mesh.group(*along) for along in axes])
            for axes, found in positions.items()
        ]

    def compute(self, lr: float, step: int, clipping: Clipping) -> None:
        with self._mesh.recorder.action("compute_updates"):
            for shard, rule in zip(self._shards, self._rules, strict=True):
                grad = shard.bucket.grad
                grad.mul_(clipping.grad_factor.to(grad.dtype))
                rule.compute_updates(step, clipping.skip)
            self.norms = self._compute_norms()

    def apply(self, index: int, lr: float, step: int, clipping: Clipping) -> None:
        norms = self.norms[:, self._shard_params[index].positions]
        self._rules[index].apply_updates(lr, norms, clipping.skip)

    def _compute_norms(self) -> Tensor:
        squares = torch.zeros(2, self._count, dtype=torch.float64, device=self._shards[0].master.device)
        for shard in self._shard_params:
            if shard.weights:
                counted = squares[:, shard.positions.start : shard.positions.start + len(shard.weights)]
                counted[0] = sums_of_squares(shard.weights)
                counted[1] = sums_of_squares(shard.updates)
        for positions, groups in self._reductions:
            summed = squares[:, positions]
            for group in groups:
                all_reduce(group, summed, label="parameter norms")
            squares[:, positions] = summed
        if self._mesh.tied.size > 1:  # the stages may have summed in different orders: make them bit-equal
            tied = squares[:, self._tied].contiguous()
            all_reduce(self._mesh.tied, tied, "max", label="parameter norms")
            squares[:, self._tied] = tied
        return squares.sqrt_()


def _matrices(shard: OptimizerShard, elements: tuple[int, int], mesh: Mesh) -> list[SlotRange]:
    found = shard.bucket.layout.matrix_ranges(*elements, mesh.topology)
    return [item for item in found if item.slot.parameter.is_matrix]


def _shard_params(shard: OptimizerShard, matrices: Sequence[SlotRange], first: int, mesh: Mesh) -> _ShardParams:
    """`first`: the position of the first of the bucket's `matrices`. Those that tp replicates are counted by rank 0."""
    bucket, here = shard.bucket, _matrices(shard, shard.bucket.shard, mesh)
    order = [(item.tensor.name, item.matrix) for item in matrices]
    start = first + (order.index((here[0].tensor.name, here[0].matrix)) if here else 0)
    counted = [item for item in here if mesh.tp.index == 0 or item.tensor.sharding]
    return _ShardParams(
        slice(start, start + len(here)),
        [item.view(shard.master, bucket.shard[0]) for item in counted],
        [item.view(bucket.grad, bucket.shard[0]) for item in counted],
    )
