"""This rank's shard of a bucket's master weights and optimizer state: its segments, and its parts as global tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megascale.comm.collectives import all_gather
from megascale.comm.mesh import Mesh
from megascale.device import HostBuffers
from megascale.layout.buckets import SlotRange, inside, joined
from megascale.layout.param_groups import ParamGroup
from megascale.layout.shard_slices import shard_slices
from megascale.ops.optimizer import Segment
from megascale.parallel.bucket import Bucket
from megascale.parallel.stateful import WEIGHTS, GlobalTensor, TensorShard

LOW = "low"  # state of compensated weights (`optim.compensated`)

GroupedRanges = Sequence[tuple[ParamGroup, SlotRange]]
"""Ascending ranges of a bucket, with the groups whose rules update them."""


@dataclass(frozen=True)
class OptimizerShard:
    """Master weights and optimizer state of one bucket on this rank.

    `master` [n, the size of the shard] is a view of the bucket's weights if the weights have the optimizer's dtype, or
    if they are compensated: then state `LOW` has what rounding left over. `state`: tensors by name, for the elements of
    those `ranges` whose group has that state, end to end; of names that no group has [n]. Both may be in host memory.
    `start`: of the elements in the bucket; `weights` [n] and `grad` [n]: in the bucket's memory.
    """

    bucket: Bucket
    master: Tensor
    state: dict[str, Tensor]
    ranges: GroupedRanges
    start: int
    weights: Tensor
    grad: Tensor

    @property
    def has_own_master(self) -> bool:
        """True if `master` is a separate tensor, to be rounded into the bucket's weights after an update."""
        return self.master is not self.weights

    @property
    def residual(self) -> Tensor | None:
        """The rest that is to be added to compensated weights; None if they are not."""
        return self.state.get(LOW)

    @property
    def master_fp32(self) -> Tensor:
        """The master weights, a sum in fp32 if they are compensated."""
        return self.master if self.residual is None else self.master.float() + self.residual.float()

    @property
    def bytes(self) -> int:
        """Bytes of optimizer state and separate master weights."""
        return sum(t.nbytes for t in self.state.values()) + (self.master.nbytes if self.has_own_master else 0)

    def copy_to_params(self) -> None:
        """Round a separate `master` into this rank's shard of the bucket's weights."""
        if self.has_own_master:
            self.weights.copy_(self.master)

    def segment(self, item: SlotRange) -> Segment:
        """Return what the rule of a range inside the shard sees."""
        part, parameter = self.part(item.start, item.stop), item.slot.parameter
        residual = None if self.residual is None else item.view(self.residual, self.start)
        flags, rounded = (parameter.is_matrix, parameter.weight_decay), part.weights if self.has_own_master else None
        return Segment(part.master, part.grad, part.state, *flags, residual, rounded)

    def part(self, start: int, stop: int) -> OptimizerShard:
        """Return views of the elements [start, stop) of the bucket, without residuals."""
        own, state = slice(start - self.start, stop - self.start), dict[str, Tensor]()
        ranges = [(group, item) for group, whole in self.ranges for item in inside([whole], start, stop)]
        for name, found in state_ranges(ranges).items():
            first = sum(item.numel for item in inside(self._ranges_of[name], self.start, start))
            state[name] = self.state[name][first:][: sum(item.numel for item in found)]
        return OptimizerShard(self.bucket, self.master[own], state, ranges, start, self.weights[own], self.grad[own])

    def tensors(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield master weights ("") and state by name, with their start in the bucket."""
        yield "", self.start, self.master
        for name, values in self.state.items():
            ranges = self._ranges_of.get(name) or [SlotRange(self.bucket.layout.slots[0], *self.bucket.shard)]
            parts = values.split([item.numel for item in ranges])
            yield from ((name, item.start, part) for item, part in zip(ranges, parts, strict=True))

    @cached_property
    def _ranges_of(self) -> dict[str, list[SlotRange]]:
        return state_ranges(self.ranges)


def state_ranges(ranges: GroupedRanges) -> dict[str, list[SlotRange]]:
    """Return the ranges that have a state tensor, by its name."""
    names = dict.fromkeys(name for group, _ in ranges for name in group.state)
    return {name: joined(item for group, item in ranges if name in group.state) for name in names}


def new_shard(
    bucket: Bucket, ranges: GroupedRanges, *, compensated: bool, host: HostBuffers | None = None
) -> OptimizerShard:
    """Copy the weights of a bucket's shard as master weights, and allocate state of zero for `ranges`; both in `host`
    memory, if it is given. Frozen weights are their own master weights.
    """
    weights, grad, kept = bucket.shard_weights, bucket.grad, None if bucket.frozen else host

    def zeros(size: int) -> Tensor:
        nbytes = size * grad.itemsize
        return grad.new_zeros(size) if kept is None else kept.allocate(nbytes).view(grad.dtype).zero_()

    state = {name: zeros(sum(item.numel for item in found)) for name, found in state_ranges(ranges).items()}
    master = weights if compensated or weights.dtype == grad.dtype else weights.to(grad.dtype)
    if kept is not None:
        master = zeros(weights.numel()).copy_(weights)
    elif compensated and not bucket.frozen:
        state[LOW] = torch.zeros_like(weights)
    return OptimizerShard(bucket, master, state, ranges, bucket.shard[0], weights, grad)


def global_tensors(optimizer_shards: Sequence[OptimizerShard], mesh: Mesh) -> dict[str, GlobalTensor]:
    """Return views of the tensors that this rank saves and loads, by global name.

    Where data parallelism replicates a shard, every replica has a share of it, or all of a state tensor that is not of
    the whole shard.
    """
    tensors: dict[str, GlobalTensor] = {}
    for optimizer_shard in optimizer_shards:
        bucket = optimizer_shard.bucket
        for state, start, flat in optimizer_shard.tensors():
            elements = (start, start + flat.numel())
            low, high = bucket.storage.share if elements == bucket.shard else elements
            for item in bucket.layout.param_ranges(low, high):
                parameter, first = item.slot.parameter, item.slot.start
                shapes = {tensor.name: tensor.shape for tensor in parameter.parts}
                for box in shard_slices(parameter, mesh.topology, mesh.coord, item.start - first, item.stop - first):
                    data = flat[first + box.start - start :][: math.prod(box.size)].view(box.size)
                    key = (f"{state}." if state else WEIGHTS) + box.name
                    tensor = tensors.setdefault(key, GlobalTensor(shapes[box.name], flat.dtype, []))
                    tensor.shards.append(TensorShard(box.offset, box.size, data))
    return tensors


def gather_shares(optimizer_shards: Sequence[OptimizerShard]) -> None:
    """All-gather what the replicas of a shard have read in shares (`global_tensors`)."""
    for shard in optimizer_shards:
        bucket = shard.bucket
        share = SlotRange(bucket.layout.slots[0], *bucket.storage.share)
        for _, start, flat in shard.tensors() if bucket.replicas.size > 1 else ():
            if (start, start + flat.numel()) == bucket.shard:
                whole = flat.to(bucket.grad.device)
                all_gather(bucket.replicas, whole, share.view(whole, start))
                flat.copy_(whole)
