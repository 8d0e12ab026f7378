"""Sharded optimizer: master weights and state of this rank's ZeRO shards, and clipping by the global gradient norm.

reduced bucket -> local_sq_norm | all-reduce | compute_clipping | compute_updates | update_shard -> all-gather
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.catalog.optimizers import OPTIMIZERS
from megascale.comm.collectives import all_gather
from megascale.comm.mesh import Mesh
from megascale.config.train import OptimizerConfig
from megascale.layout import buckets as layouts
from megascale.ops.optimizer import Segment
from megascale.optim.norms import ParameterNorms, sum_of_squares
from megascale.parallel.optimizer_shard import OptimizerShard, global_tensors
from megascale.parallel.param_and_grad_buffers import Bucket
from megascale.parallel.stateful import GlobalTensor


class ShardedOptimizer:
    """Clips gradients and updates the shards of this rank's buckets.

    Construct after weights are initialized: master weights copy them. A step has two phases, without host-device
    synchronization. First `local_sq_norm` measures buckets, as their reductions complete; the global norm gives the
    factor of all gradients. Then `update_shard` updates bucket after bucket, and the all-gather of a bucket overlaps
    with the next update. Between the phases a rule with trust ratios computes the updates of all buckets.

    `rule`: an `Elementwise` or `NeedsParamNorms` rule (`ops.optimizer`), as `catalog.optimizers` declares.
    """

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, config: OptimizerConfig, rule: type[Any]) -> None:
        needs_norms = OPTIMIZERS[config.name].facts["unit_of_work"] == "param_norms"
        ranges = layouts.BucketLayout.param_ranges if needs_norms else layouts.BucketLayout.merged_ranges
        self._mesh = mesh
        self._clip = config.clip_norm
        self.shards = [_optimizer_shard(bucket, rule.state_names) for bucket in buckets]
        self._rules = [rule(_segments(shard, ranges), config) for shard in self.shards]
        self._norms = ParameterNorms(self.shards, mesh) if needs_norms else None

    def local_sq_norm(self, bucket: Bucket) -> Tensor:
        """Compute this rank's contribution of a bucket to the global squared gradient norm, an f64 device scalar.

        Over the job, every parameter of the model counts once.
        """
        total = torch.zeros((), dtype=torch.float64, device=bucket.grad.device)
        for low, high in counted_ranges(bucket, self._mesh):
            total += sum_of_squares(bucket.grad[low:high])
        return total

    def compute_clipping(self, sq_norm: Tensor, tokens: Tensor, loss: Tensor) -> Clipping:
        """Compute the clipping of gradients summed over `tokens`, from the squared norm and loss sums over the job."""
        norm = sq_norm.sqrt() / tokens
        finite = norm.isfinite() & loss.isfinite()
        limit = (self._clip / (norm + 1e-6)).clamp(max=1.0) if self._clip else torch.ones_like(norm)
        factor = torch.where(finite, limit / tokens, torch.ones_like(norm))
        return Clipping(norm, factor, (~finite).float())

    def clip_grad(self, index: int, clipping: Clipping) -> None:
        """Scale the gradient of bucket `index`, for a rule whose kernel does not scale."""
        grad = self.shards[index].bucket.grad
        grad *= clipping.grad_factor.to(grad.dtype)

    def compute_updates(self, clipping: Clipping, step: int) -> Tensor | None:
        """For a rule that needs parameter norms, overwrite all gradients with updates, and return the norms.

        Returns None for an elementwise rule. `step` counts from 1.
        """
        if self._norms is None:
            return None
        with self._mesh.recorder.action("compute_updates"):
            for index, rule in enumerate(self._rules):
                self.clip_grad(index, clipping)
                rule.compute_updates(step, clipping.skip)
            return self._norms.compute()

    def update_shard(self, index: int, clipping: Clipping, norms: Tensor | None, lr: float, step: int) -> None:
        """Update this rank's shard of bucket `index`, with the `norms` of `compute_updates`.

        The bucket's other shards are outdated until `start_param_gather`. If the loss or the gradient norm is not
        finite, nothing changes, not even the gradient: the guard reads the gradient to find the cause.
        """
        shard, rule = self.shards[index], self._rules[index]
        if self._norms is None:
            rule.step(lr, step, clipping.grad_factor, clipping.skip)
        else:
            assert norms is not None, "`compute_updates` comes first"
            rule.apply_updates(lr, self._norms.for_shard(norms, index), clipping.skip)
        shard.publish()

    def global_tensors(self) -> dict[str, GlobalTensor]:
        """Return master weights (`weights.NAME`) and state (`exp_avg.NAME`, ...); see `parallel.stateful.Stateful`."""
        return global_tensors(self.shards, self._mesh)

    def flat_tensors(self) -> list[Tensor]:
        return [tensor for shard in self.shards for tensor in (shard.master, *shard.state.values())]

    def begin_load(self, saved: Mapping[str, Sequence[int]]) -> dict[str, GlobalTensor]:
        return self.global_tensors()  # all of it must be saved

    def end_load(self) -> None:
        """All-gather replicated buckets (`zero = 0`), which their data-parallel replicas have read in shares."""
        for shard in self.shards:
            if not shard.bucket.zero:
                share = slice(*shard.bucket.layout.shard_range(shard.bucket.group.index))
                for flat in (shard.master, *shard.state.values()):
                    all_gather(shard.bucket.group, flat, flat[share])

    def end_restore(self) -> None:
        return None

    def copy_masters_to_weights(self) -> None:
        """Round master weights into this rank's shards of the weights, after a checkpoint was loaded."""
        for shard in self.shards:
            shard.publish()


@dataclass(frozen=True)
class Clipping:
    """Device scalars of a step: `norm`, f64, of the mean gradient before clipping; `grad_factor`, f64, to scale all
    gradients by; `skip`, f32, 1 to skip the update (then `grad_factor` is 1).
    """

    norm: Tensor
    grad_factor: Tensor
    skip: Tensor


def counted_ranges(bucket: Bucket, mesh: Mesh) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a bucket's shard, relative to its start, that this rank contributes to sums over the job.

    Replicas count once: the dp replicas with zero = 0, a tied embedding, and parameters replicated over tp.
    """
    if not bucket.counts_in_norm or (bucket.zero == 0 and bucket.group.index):
        return
    start, stop = bucket.shard
    if mesh.tp.index:
        stop = min(stop, bucket.layout.replicated[0])  # tp rank 0 counts the replicated parameters
    if start < stop:
        yield 0, stop - start


def _optimizer_shard(bucket: Bucket, names: Sequence[str]) -> OptimizerShard:
    weights = bucket.shard_weights
    master = weights if weights.dtype == bucket.grad.dtype else weights.to(bucket.grad.dtype)
    return OptimizerShard(bucket, master, {name: torch.zeros_like(master) for name in names})


def _segments(shard: OptimizerShard, ranges: Callable[..., list[tuple[layouts.Slot, int, int]]]) -> list[Segment]:
    """Split a shard by parameter (`param_ranges`), or into few segments, padding included (`merged_ranges`)."""
    bucket, segments = shard.bucket, []
    for slot, low, high in ranges(bucket.layout, *bucket.shard):
        elements, parameter = slice(low - bucket.shard[0], high - bucket.shard[0]), slot.parameter
        state = {name: tensor[elements] for name, tensor in shard.state.items()}
        segments.append(
            Segment(shard.master[elements], bucket.grad[elements], state, parameter.is_matrix, parameter.weight_decay)
        )
    return segments
