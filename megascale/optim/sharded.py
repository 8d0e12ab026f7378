"""The optimizer over this rank's shards: master weights, state, and the global norm of the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.comm.collectives import all_reduce
from megascale.comm.mesh import Mesh
from megascale.config.train import OptimizerConfig
from megascale.optim.contract import Optimizer, Segment
from megascale.parallel.gradients import Bucket
from megascale.parallel.shards import ShardState


class ShardedOptimizer:
    """Clips and updates the shards of this rank's buckets. Weights must be set before it is made: masters copy them."""

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, config: OptimizerConfig) -> None:
        body: type[Optimizer] = OPTIMIZERS[config.name].load()
        self._mesh = mesh
        self._clip = config.clip_norm
        self.shards = [_shard_state(bucket, body.state_names) for bucket in buckets]
        self._optimizer = body([s for shard in self.shards for s in _segments(shard)], config)

    def scale_and_clip(self, scale: float) -> float:
        """Multiply all gradients by `scale`, and further so that their norm is at most the limit. Returns the norm of
        the whole gradient after `scale` and before clipping; every parameter of the model counts once.

        If the norm is not finite the gradients are left as they are.
        """
        square = torch.zeros((), dtype=torch.float64, device=self.shards[0].master.device)
        for shard in self.shards:
            for low, high in counted(shard.bucket, self._mesh):
                square += torch.linalg.vector_norm(shard.bucket.grad[low:high]).double().square()
        all_reduce(self._mesh.world, square)
        total = float(square)
        norm = math.sqrt(total) * scale if math.isfinite(total) else math.nan
        if math.isfinite(norm):
            limit = min(1.0, self._clip / (norm + 1e-6)) if self._clip else 1.0
            for shard in self.shards:
                shard.bucket.grad *= scale * limit
        return norm

    def step(self, lr: float, step: int) -> None:
        """Update this rank's shards; `step` counts from 1. The weights of other shards are then out of date."""
        self._optimizer.step(lr, step)
        for shard in self.shards:
            if shard.separate:
                shard.bucket.shard_weights.copy_(shard.master)

    def publish_masters(self) -> None:
        """After masters were read from a checkpoint: round them into this rank's shards of the weights."""
        for shard in self.shards:
            if shard.separate:
                shard.bucket.shard_weights.copy_(shard.master)


def counted(bucket: Bucket, mesh: Mesh) -> Iterator[tuple[int, int]]:
    """The ranges of a bucket's shard, from the shard's start, that this rank alone adds to sums over the whole job.

    Replicas add once: of data parallelism with zero = 0, of a tied embedding, and of what every tp rank holds whole.
    """
    if not bucket.counts or (bucket.zero == 0 and mesh.dp.index):
        return
    start, stop = bucket.shard
    if mesh.tp.index:
        stop = min(stop, bucket.layout.whole[0])  # what follows belongs to tp rank 0 alone
    if start < stop:
        yield 0, stop - start


def _shard_state(bucket: Bucket, names: Sequence[str]) -> ShardState:
    weights = bucket.shard_weights
    master = weights if weights.dtype == bucket.grad.dtype else weights.to(bucket.grad.dtype)
    return ShardState(bucket, master, {name: torch.zeros_like(master) for name in names})


def _segments(shard: ShardState) -> Iterator[Segment]:
    base = shard.bucket.shard[0]
    for low, high, decays in shard.bucket.layout.runs(*shard.bucket.shard):
        here = slice(low - base, high - base)
        state = {name: tensor[here] for name, tensor in shard.state.items()}
        yield Segment(shard.master[here], shard.bucket.grad[here], state, decays)
