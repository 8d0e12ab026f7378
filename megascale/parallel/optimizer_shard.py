"""This rank's shard of a bucket's master weights and optimizer state, and its parts as global tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.comm.mesh import Mesh
from megascale.layout.boxes import boxes
from megascale.parallel.param_and_grad_buffers import Bucket
from megascale.parallel.stateful import WEIGHTS, GlobalTensor, TensorShard


@dataclass(frozen=True)
class OptimizerShard:
    """Master weights and optimizer state of one bucket on this rank, all [size of the shard].

    `master` is a view of the bucket's weights if the weights have the optimizer's dtype.
    """

    bucket: Bucket
    master: Tensor
    state: dict[str, Tensor]

    @property
    def has_own_master(self) -> bool:
        """True if `master` is a separate tensor, to be rounded into the bucket's weights after an update."""
        return self.master.dtype != self.bucket.weights.dtype

    def publish(self) -> None:
        """Round a separate `master` into this rank's shard of the bucket's weights."""
        if self.has_own_master:
            self.bucket.shard_weights.copy_(self.master)

    @property
    def bytes(self) -> int:
        """Bytes of optimizer state and separate master weights."""
        return sum(t.nbytes for t in self.state.values()) + (self.master.nbytes if self.has_own_master else 0)


def global_tensors(optimizer_shards: Sequence[OptimizerShard], mesh: Mesh) -> dict[str, GlobalTensor]:
    """Return views of the tensors that this rank saves and loads, by global name.

    Where a bucket is replicated over data parallelism, every replica has a share of the bucket.
    """
    tensors: dict[str, GlobalTensor] = {}
    for optimizer_shard in optimizer_shards:
        state = {f"{name}.": flat for name, flat in optimizer_shard.state.items()}
        for kind, flat in ({WEIGHTS: optimizer_shard.master} | state).items():
            for name, shape, shard in _tensor_shards(optimizer_shard, flat, mesh):
                tensor = tensors.setdefault(kind + name, GlobalTensor(shape, flat.dtype, []))
                tensor.shards.append(shard)
    return tensors


def _tensor_shards(
    optimizer_shard: OptimizerShard, flat: torch.Tensor, mesh: Mesh
) -> Iterator[tuple[str, tuple[int, ...], TensorShard]]:
    """Yield name, global shape and shard of every tensor with elements in the flat memory of an optimizer shard."""
    bucket = optimizer_shard.bucket
    layout, shard_start = bucket.layout, bucket.shard[0]
    for slot, low, high in layout.param_ranges(*layout.shard_range(bucket.group.index)):
        shapes = {tensor.name: tensor.shape for tensor in slot.parameter.parts}
        for box in boxes(slot.parameter, mesh.topology, mesh.coord, low - slot.start, high - slot.start):
            start = slot.start + box.start - shard_start
            data = flat[start : start + torch.Size(box.size).numel()].view(box.size)
            yield box.name, shapes[box.name], TensorShard(box.offset, box.size, data)
