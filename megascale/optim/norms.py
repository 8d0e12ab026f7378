"""Norms of whole parameters, from what each rank holds of them.

A parameter lies in one pipeline stage, cut by tp or whole on each tp rank, and cut again into the shards of its bucket
with zero >= 1. Squares are added up over these two axes for all parameters of the stage at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.comm.mesh import Mesh
from megascale.parallel.shards import ShardState

ROW = 1 << 14
"""Elements whose squares are added up in their own dtype."""


@dataclass(frozen=True)
class _Held:
    """The parameters that a shard has parts of: their places among the stage's, and the parts that this rank counts,
    which are the first of them.
    """

    places: slice
    weights: list[Tensor]
    directions: list[Tensor]


class ParameterNorms:
    """L2 norms of the weights and of the gradients, or what has been written over them, of this stage's matrices."""

    def __init__(self, shards: Sequence[ShardState], mesh: Mesh) -> None:
        self._mesh = mesh
        self._held: list[_Held] = []
        self._tied = slice(0)  # the place of an embedding that lives at both ends of the pipeline
        self._count = 0
        for shard in shards:
            self._held.append(_held(shard, self._count, mesh.tp.index))
            count = sum(slot.parameter.is_matrix for slot in shard.bucket.layout.slots)
            if shard.bucket.tied:
                self._tied = slice(self._count, self._count + count)
            self._count += count
        self._sharded = shards[0].bucket.zero > 0
        self._device = shards[0].master.device

    def form(self) -> Tensor:
        """The norms [2, parameters], f64: of weights, and of what lies in the gradients. The same on all ranks that
        hold any of a parameter.
        """
        squares = torch.zeros(2, self._count, dtype=torch.float64, device=self._device)
        for held in self._held:
            if held.weights:
                counted = squares[:, held.places.start : held.places.start + len(held.weights)]
                counted[0] = sums_of_squares(held.weights)
                counted[1] = sums_of_squares(held.directions)
        all_reduce(self._mesh.tp, squares, what="parameter norms")
        if self._sharded:
            all_reduce(self._mesh.dp, squares, what="parameter norms")
        if self._mesh.tied.size > 1:  # both ends have the same sums, but perhaps not to the last bit, by another order
            tied = squares[:, self._tied].contiguous()
            all_reduce(self._mesh.tied, tied, "max", what="parameter norms")
            squares[:, self._tied] = tied
        return squares.sqrt_()

    def of(self, norms: Tensor, index: int) -> Tensor:
        """Of all norms, those of the parameters that shard `index` has parts of [2, parts]."""
        return norms[:, self._held[index].places]


def _held(shard: ShardState, first: int, tp_rank: int) -> _Held:
    """`first`: the place of the bucket's first parameter. What every tp rank holds whole, tp rank 0 counts."""
    bucket = shard.bucket
    base = bucket.shard[0]
    slots = [slot for slot in bucket.layout.slots if slot.parameter.is_matrix]
    parts = [part for part in bucket.layout.parts(*bucket.shard) if part[0].parameter.is_matrix]
    start = first + (slots.index(parts[0][0]) if parts else 0)
    counted = [slice(a - base, b - base) for slot, a, b in parts if tp_rank == 0 or "tp" in slot.parameter.sharding]
    return _Held(
        slice(start, start + len(parts)),
        [shard.master[part] for part in counted],
        [bucket.grad[part] for part in counted],
    )


def sum_of_squares(x: Tensor) -> Tensor:
    """The sum of the squares of x [n]: an f64 scalar. By rows: on a CPU the norm of many millions of f32 numbers is
    added up in f32, and parts in a thousand are lost.
    """
    whole = x.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(x[:whole].view(-1, ROW), dim=1)
    return rows.double().square().sum() + torch.linalg.vector_norm(x[whole:]).double().square()


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of each of n tensors [n], f64. GPUs add up many at a time, and in small parts."""
    if tensors[0].is_cpu:
        return torch.stack([sum_of_squares(tensor) for tensor in tensors])
    return torch.stack(torch._foreach_norm(list(tensors))).double().square_()
