"""L2 norms of whole matrices from their shards, for trust ratios: q, k and v, and gate and up, each have their own.

A matrix belongs to one pipeline stage. Within the stage it is sharded or replicated over tp, and with zero >= 1 sharded
over dp. The sums of squares of all matrices of the stage are all-reduced over both axes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.comm.mesh import Mesh
from megascale.layout.tensors import TensorSpec
from megascale.parallel.optimizer_shard import OptimizerShard

ROW = 1 << 14
"""Elements whose squares are summed in the tensor's own dtype."""


@dataclass(frozen=True)
class _ShardParams:
    """The matrices in a shard: their positions among the stage's, and the weights and updates that this rank adds to
    the sums, a prefix of the matrices.
    """

    positions: slice
    weights: list[Tensor]
    updates: list[Tensor]


class ParameterNorms:
    """L2 norms of the weights and updates of this stage's matrices; updates have overwritten the gradients."""

    def __init__(self, shards: Sequence[OptimizerShard], mesh: Mesh) -> None:
        self._mesh = mesh
        self._shard_params: list[_ShardParams] = []
        self._tied = slice(0)  # position of a tied embedding, shared by the first and last stages
        self._count = 0
        for shard in shards:
            matrices = _matrices(shard, (0, shard.bucket.layout.numel), mesh)
            self._shard_params.append(_shard_params(shard, matrices, self._count, mesh))
            count = len(matrices)
            if shard.bucket.tied:
                self._tied = slice(self._count, self._count + count)
            self._count += count
        self._sharded = shards[0].bucket.zero > 0
        self._device = shards[0].master.device

    def compute(self) -> Tensor:
        """Compute norms [2, matrices], f64, of weights and updates; equal on all ranks that hold a matrix."""
        squares = torch.zeros(2, self._count, dtype=torch.float64, device=self._device)
        for shard in self._shard_params:
            if shard.weights:
                counted = squares[:, shard.positions.start : shard.positions.start + len(shard.weights)]
                counted[0] = sums_of_squares(shard.weights)
                counted[1] = sums_of_squares(shard.updates)
        all_reduce(self._mesh.tp, squares, label="parameter norms")
        if self._sharded:
            all_reduce(self._mesh.dp, squares, label="parameter norms")
        if self._mesh.tied.size > 1:  # the stages may have summed in different orders: make them bit-equal
            tied = squares[:, self._tied].contiguous()
            all_reduce(self._mesh.tied, tied, "max", label="parameter norms")
            squares[:, self._tied] = tied
        return squares.sqrt_()

    def for_shard(self, norms: Tensor, index: int) -> Tensor:
        """Select the norms of the matrices in shard `index`, [2, matrices]."""
        return norms[:, self._shard_params[index].positions]


Matrices = list[tuple[TensorSpec, int, int]]
"""Matrices with the elements (start, stop) of a bucket."""


def _matrices(shard: OptimizerShard, elements: tuple[int, int], mesh: Mesh) -> Matrices:
    found = shard.bucket.layout.tensor_ranges(*elements, mesh.topology)
    return [(tensor, low, high) for parameter, tensor, low, high in found if parameter.is_matrix]


def _shard_params(shard: OptimizerShard, matrices: Matrices, first: int, mesh: Mesh) -> _ShardParams:
    """`first`: the position of the first of the bucket's `matrices`. Those that tp replicates are counted by rank 0."""
    bucket = shard.bucket
    base = bucket.shard[0]
    here = _matrices(shard, bucket.shard, mesh)
    start = first + ([tensor for tensor, _, _ in matrices].index(here[0][0]) if here else 0)
    counted = [slice(low - base, high - base) for t, low, high in here if mesh.tp.index == 0 or "tp" in t.sharding]
    return _ShardParams(
        slice(start, start + len(here)),
        [shard.master[elements] for elements in counted],
        [bucket.grad[elements] for elements in counted],
    )


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum the squares of x [n]: an f64 scalar.

    Summed by rows, because a CPU sums in fp32: over many millions of fp32 elements the error would reach 0.1%.
    """
    full_rows = x.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(x[:full_rows].view(-1, ROW), dim=1)
    return rows.double().square().sum() + torch.linalg.vector_norm(x[full_rows:]).double().square()


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum the squares of n tensors, [n], f64. GPUs sum in small blocks, many tensors per kernel."""
    if tensors[0].is_cpu:
        return torch.stack([sum_of_squares(tensor) for tensor in tensors])
    return torch.stack(torch._foreach_norm(list(tensors))).double().square_()
