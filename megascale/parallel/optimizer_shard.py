"""This rank's shard of a bucket's master weights and optimizer state, and its parts as global tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megascale.comm.collectives import all_gather
from megascale.comm.mesh import Mesh
from megascale.layout.shard_slices import shard_slices
from megascale.parallel.param_and_grad_buffers import Bucket
from megascale.parallel.stateful import WEIGHTS, GlobalTensor, TensorShard

LOW = "low"
"""State of compensated weights (`optim.compensated`)."""

Ranges = Sequence[tuple[int, int]]
"""Ascending ranges [start, stop) of elements of a bucket."""


@dataclass(frozen=True)
class OptimizerShard:
    """Master weights and optimizer state of one bucket on this rank.

    `master` [size of the shard] is a view of the bucket's weights if the weights have the optimizer's dtype, or if they
    are compensated: then state `LOW` has what rounding left over. `state`:
    tensors by name, for the elements in the `ranges` of that name, end to end; without ranges [size of the shard].
    """

    bucket: Bucket
    master: Tensor
    state: dict[str, Tensor]
    ranges: Mapping[str, Ranges] = field(default_factory=dict)

    @property
    def has_own_master(self) -> bool:
        """True if `master` is a separate tensor, to be rounded into the bucket's weights after an update."""
        return self.master.dtype != self.bucket.weights.dtype

    @property
    def residual(self) -> Tensor | None:
        """The rest that is to be added to compensated weights; None if they are not."""
        return self.state.get(LOW)

    @property
    def master_fp32(self) -> Tensor:
        """The master weights, a sum in fp32 if they are compensated."""
        return self.master if self.residual is None else self.master.float() + self.residual.float()

    def copy_to_params(self) -> None:
        """Round a separate `master` into this rank's shard of the bucket's weights."""
        if self.has_own_master:
            self.bucket.shard_weights.copy_(self.master)

    @property
    def bytes(self) -> int:
        """Bytes of optimizer state and separate master weights."""
        return sum(t.nbytes for t in self.state.values()) + (self.master.nbytes if self.has_own_master else 0)

    def state_parts(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the ranges of a state tensor: start in the bucket, and elements."""
        ranges = self.ranges.get(name, [self.bucket.shard])
        sizes = [stop - start for start, stop in ranges]
        yield from zip((start for start, _ in ranges), self.state[name].split(sizes), strict=True)

    def state_of(self, name: str, start: int, stop: int) -> Tensor:
        """Return a view of a state tensor for the elements [start, stop) of the bucket, which are in one range."""
        for first, values in self.state_parts(name):
            if first <= start and stop <= first + values.numel():
                return values[start - first : stop - first]
        raise KeyError(f"{name} has no elements [{start}, {stop})")

    def tensors(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield master weights ("") and state by name, with their start in the bucket."""
        yield "", self.bucket.shard[0], self.master
        for name in self.state:
            yield from ((name, start, values) for start, values in self.state_parts(name))


def global_tensors(optimizer_shards: Sequence[OptimizerShard], mesh: Mesh) -> dict[str, GlobalTensor]:
    """Return views of the tensors that this rank saves and loads, by global name.

    Where a bucket is replicated over data parallelism, every replica has a share of the bucket, or all of a state
    tensor that is not the whole bucket's.
    """
    tensors: dict[str, GlobalTensor] = {}
    for optimizer_shard in optimizer_shards:
        layout, group = optimizer_shard.bucket.layout, optimizer_shard.bucket.group
        share = layout.shard_range(group.index)
        for state, start, flat in optimizer_shard.tensors():
            whole = (start, start + flat.numel()) != optimizer_shard.bucket.shard
            low, high = (start, start + flat.numel()) if whole else share
            for name, shape, shard in _tensor_shards(optimizer_shard, flat[low - start : high - start], low, mesh):
                key = (f"{state}." if state else WEIGHTS) + name
                tensor = tensors.setdefault(key, GlobalTensor(shape, flat.dtype, []))
                tensor.shards.append(shard)
    return tensors


def _tensor_shards(
    optimizer_shard: OptimizerShard, flat: torch.Tensor, first: int, mesh: Mesh
) -> Iterator[tuple[str, tuple[int, ...], TensorShard]]:
    """Yield name, global shape and shard of every tensor with elements in `flat`, which begins at `first` in the
    bucket.
    """
    layout = optimizer_shard.bucket.layout
    for slot, low, high in layout.param_ranges(first, first + flat.numel()):
        shapes = {tensor.name: tensor.shape for tensor in slot.parameter.parts}
        for box in shard_slices(slot.parameter, mesh.topology, mesh.coord, low - slot.start, high - slot.start):
            start = slot.start + box.start - first
            data = flat[start : start + torch.Size(box.size).numel()].view(box.size)
            yield box.name, shapes[box.name], TensorShard(box.offset, box.size, data)


def gather_shares(optimizer_shards: Sequence[OptimizerShard]) -> None:
    """All-gather what the replicas of a bucket without ZeRO have read in shares (`global_tensors`)."""
    for shard in optimizer_shards:
        if not shard.bucket.zero:
            share = slice(*shard.bucket.layout.shard_range(shard.bucket.group.index))
            for _, start, flat in shard.tensors():
                if (start, start + flat.numel()) == shard.bucket.shard:
                    all_gather(shard.bucket.group, flat, flat[share])


def merge_ranges(ranges: Ranges) -> list[tuple[int, int]]:
    """Merge ranges that touch."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
