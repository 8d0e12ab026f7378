"""The optimizer over this rank's shards: master weights, state, and the global norm of the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.comm.mesh import Mesh
from megascale.config.train import OptimizerConfig
from megascale.layout import buckets as layouts
from megascale.ops.optimizer import Segment
from megascale.optim.norms import ParameterNorms, sum_of_squares
from megascale.parallel.gradients import Bucket
from megascale.parallel.shards import ShardState


class ShardedOptimizer:
    """Clips and updates the shards of this rank's buckets. Weights must be set before it is made: masters copy them.

    A step has two phases, and the device decides, not the host. Each bucket is measured when its gradient is complete;
    from the sum over the job follows the factor of all gradients, and then bucket after bucket is updated, so that the
    first can be gathered while the next is. Between the two, a rule that wants norms of whole parameters forms its
    directions of all buckets.

    `rule`: an `Elementwise` or a `Normwise` (`ops.optimizer`), as the optimizer's card says.
    """

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, config: OptimizerConfig, rule: type[Any]) -> None:
        normwise = OPTIMIZERS[config.name].facts["needs"] == "norms"
        cut = layouts.Bucket.parts if normwise else layouts.Bucket.runs
        self._mesh = mesh
        self._clip = config.clip_norm
        self.shards = [_shard_state(bucket, rule.state_names) for bucket in buckets]
        self._rules = [rule(_segments(shard, cut), config) for shard in self.shards]
        self._norms = ParameterNorms(self.shards, mesh) if normwise else None

    def square(self, bucket: Bucket) -> Tensor:
        """What a bucket adds to the squared norm of the gradient on this rank; every parameter of the model counts
        once. An f64 scalar on the device.
        """
        total = torch.zeros((), dtype=torch.float64, device=bucket.grad.device)
        for low, high in counted(bucket, self._mesh):
            total += sum_of_squares(bucket.grad[low:high])
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
        """Scale the gradient of bucket `index`, for a rule that does not do so in its own pass."""
        grad = self.shards[index].bucket.grad
        grad *= clipping.factor.to(grad.dtype)

    def direct(self, clipping: Clipping, step: int) -> Tensor | None:
        """What `update` needs to know of whole parameters before it begins, `step` counted from 1: for a rule that
        wants norms, clip and turn all gradients into directions, and form the norms. For others nothing, at no cost.
        """
        if self._norms is None:
            return None
        with self._mesh.recorder.action("directions"):
            for index, rule in enumerate(self._rules):
                self.clip(index, clipping)
                rule.direct(step, clipping.skip)
            return self._norms.form()

    def update(self, index: int, clipping: Clipping, norms: Tensor | None, lr: float, step: int) -> None:
        """Update the shard of bucket `index`, with what `direct` has returned. Other ranks' shards of its weights are
        then out of date. If loss or norm is not finite nothing is changed, the gradient neither: the guard reads it.
        """
        shard, rule = self.shards[index], self._rules[index]
        if self._norms is None:
            rule.step(lr, step, clipping.factor, clipping.skip)
        else:
            assert norms is not None, "`direct` comes first"
            rule.apply(lr, self._norms.of(norms, index), clipping.skip)
        shard.publish()

    def publish_masters(self) -> None:
        """After masters were read from a checkpoint: round them into this rank's shards of the weights."""
        for shard in self.shards:
            shard.publish()


@dataclass(frozen=True)
class Clipping:
    """Scalars on the device. `norm`, f64: of the mean gradient before clipping. `factor`, f64: of all gradients, 1 if
    nothing may be updated.
    `skip`, f32: 1 if nothing may be updated.
    """

    norm: Tensor
    factor: Tensor
    skip: Tensor


def counted(bucket: Bucket, mesh: Mesh) -> Iterator[tuple[int, int]]:
    """The ranges of a bucket's shard, from the shard's start, that this rank alone adds to sums over the whole job.

    Replicas add once: of data parallelism with zero = 0, of a tied embedding, and of what every tp rank holds whole.
    """
    if not bucket.counts or (bucket.zero == 0 and bucket.group.index):
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


def _segments(shard: ShardState, cut: Callable[..., list[tuple[layouts.Slot, int, int]]]) -> list[Segment]:
    """A shard cut by parameters (`Bucket.parts`), or in as few segments as can be, padding included (`Bucket.runs`)."""
    bucket, found = shard.bucket, []
    for slot, low, high in cut(bucket.layout, *bucket.shard):
        here, parameter = slice(low - bucket.shard[0], high - bucket.shard[0]), slot.parameter
        state = {name: tensor[here] for name, tensor in shard.state.items()}
        segment = Segment(shard.master[here], bucket.grad[here], state, parameter.is_matrix, parameter.weight_decay)
        found.append(segment)
    return found
