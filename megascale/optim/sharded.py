"""The optimizer over this rank's shards: master weights, state, and the global norm of the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.comm.mesh import Mesh
from megascale.config.train import OptimizerConfig
from megascale.optim.contract import Optimizer, Segment
from megascale.parallel.gradients import Bucket
from megascale.parallel.shards import ShardState

ROW = 1 << 14
"""Numbers whose squares are added up in their own format."""


class ShardedOptimizer:
    """Clips and updates the shards of this rank's buckets. Weights must be set before it is made: masters copy them.

    A step has two phases, and the device decides, not the host. Each bucket is measured when its gradient is complete;
    from the sum over the job follows the factor of all gradients, and then bucket after bucket is updated, so that the
    first can be gathered while the next is.
    """

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, config: OptimizerConfig) -> None:
        body: type[Optimizer] = OPTIMIZERS[config.name].load()
        self._mesh = mesh
        self._clip = config.clip_norm
        self.shards = [_shard_state(bucket, body.state_names) for bucket in buckets]
        self._rules = [body(list(_segments(shard)), config) for shard in self.shards]

    def square(self, bucket: Bucket) -> Tensor:
        """What a bucket adds to the squared norm of the gradient on this rank; every parameter of the model counts
        once. An f64 scalar on the device.
        """
        total = torch.zeros((), dtype=torch.float64, device=bucket.grad.device)
        for low, high in counted(bucket, self._mesh):
            total += _square(bucket.grad[low:high])
        return total

    def clipping(self, square: Tensor, tokens: Tensor, loss: Tensor) -> Clipping:
        """What becomes of gradients that are sums over `tokens` and have this squared norm over the whole job, where
        the losses add up to `loss`.
        """
        norm = square.sqrt() / tokens
        finite = norm.isfinite() & loss.isfinite()
        limit = (self._clip / (norm + 1e-6)).clamp(max=1.0) if self._clip else torch.ones_like(norm)
        factor = torch.where(finite, limit / tokens, torch.ones_like(norm))
        return Clipping(norm, factor, (~finite).float())

    def clip(self, index: int, clipping: Clipping) -> None:
        """Scale the gradient of bucket `index`."""
        grad = self.shards[index].bucket.grad
        grad *= clipping.factor.to(grad.dtype)

    def update(self, index: int, clipping: Clipping, lr: float, step: int) -> None:
        """Clip and update the shard of bucket `index`; `step` counts from 1. Other ranks' shards of its weights are
        then out of date. If loss or norm is not finite nothing is changed, the gradient neither.
        """
        shard = self.shards[index]
        self.clip(index, clipping)
        self._rules[index].step(lr, step, clipping.skip)
        if shard.separate:
            shard.bucket.shard_weights.copy_(shard.master)

    def publish_masters(self) -> None:
        """After masters were read from a checkpoint: round them into this rank's shards of the weights."""
        for shard in self.shards:
            if shard.separate:
                shard.bucket.shard_weights.copy_(shard.master)


@dataclass(frozen=True)
class Clipping:
    """Scalars on the device. `norm`, f64: of the mean gradient before clipping. `factor`, f64: of all gradients.
    `skip`, f32: 1 if nothing may be updated.
    """

    norm: Tensor
    factor: Tensor
    skip: Tensor


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


def _square(x: Tensor) -> Tensor:
    """The sum of the squares of x [n]: an f64 scalar. By rows: on a CPU the norm of many millions of f32 numbers is
    added up in f32, and parts in a thousand are lost.
    """
    whole = x.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(x[:whole].view(-1, ROW), dim=1)
    return rows.double().square().sum() + torch.linalg.vector_norm(x[whole:]).double().square()


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
