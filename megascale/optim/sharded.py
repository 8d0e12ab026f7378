"""Sharded optimizer: master weights and state of this rank's ZeRO shards, and clipping by the global gradient norm.

reduced bucket -> local_sq_norm | all-reduce | compute_clipping | compute_updates | update_shard -> all-gather

Each parameter group (`layout.param_groups`) has a rule. Rules of elements see the flat ranges of a shard that belong to
their groups, rules with parameter norms the parts of parameters, and rules of whole matrices run on owners
(`optim.matrix_updates`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.catalog.optimizers import REST
from megascale.comm.mesh import Mesh
from megascale.config.train import OptimizerConfig
from megascale.core.errors import ConfigError, Problem
from megascale.layout.owners import assign_owners
from megascale.layout.param_groups import ParamGroup, ParamGroups
from megascale.optim.adam import adam, adam_options
from megascale.optim.function_rule import FunctionRule
from megascale.optim.matrix_updates import MatrixUpdates
from megascale.optim.norms import ParameterNorms, sum_of_squares
from megascale.optim.saved_state import add_rests, begin_with_rests, fresh_state, saved_groups
from megascale.optim.segments import FlatRange, flat_ranges, segments_of, state_ranges, tensor_segments
from megascale.optim.step_guard import StepGuard
from megascale.parallel.optimizer_shard import LOW, OptimizerShard, gather_shares, global_tensors
from megascale.parallel.param_and_grad_buffers import Bucket
from megascale.parallel.stateful import GlobalTensor


class ShardedOptimizer:
    """Clips gradients and updates the shards of this rank's buckets.

    Construct after weights are initialized: master weights copy them. A step has two phases, without host-device
    synchronization. First `local_sq_norm` measures buckets, as their reductions complete; the global norm gives the
    factor of all gradients. Then `update_shard` updates bucket after bucket, and the all-gather of a bucket overlaps
    with the next update. Between the phases a rule with trust ratios computes the updates of all buckets, and rules of
    whole matrices compute theirs.

    `rules`: the rules of all groups by name, as `ops.optimizer` describes them. `guard`: of steps against spikes.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        mesh: Mesh,
        config: OptimizerConfig,
        rules: Mapping[str, Any],
        guard: StepGuard | None = None,
    ) -> None:
        groups = self._groups = ParamGroups(config)
        self._mesh = mesh
        self._clip = config.clip_norm
        self._zclip, self._skips = config.zclip, config.skip_sigma > 0
        self._guard = guard
        flat = [flat_ranges(bucket.layout, groups, mesh.topology, bucket.shard) for bucket in buckets]
        pairs = config.master == "compensated"
        self.shards = [_optimizer_shard(bucket, ranges, pairs) for bucket, ranges in zip(buckets, flat, strict=True)]
        self._norms: ParameterNorms | None = None
        if groups.default.facts["unit_of_work"] == "param_norms":
            self._norm_rules = [
                rules[config.name](tensor_segments(shard, mesh.topology), config) for shard in self.shards
            ]
            self._norms = ParameterNorms(self.shards, mesh)
            flat = [[] for _ in buckets]
        self._rules = [
            _build_rules(shard, ranges, config, rules) for shard, ranges in zip(self.shards, flat, strict=True)
        ]
        places = assign_owners(
            [bucket.layout for bucket in buckets], groups, mesh.topology, buckets[0].zero if buckets else 0
        )
        self._matrices = {
            index: MatrixUpdates(shard, of_bucket, mesh, rules)
            for index, (shard, of_bucket) in enumerate(zip(self.shards, places, strict=True))
            if of_bucket
        }
        self.fresh_state: set[str] = set()
        self._rests: dict[str, GlobalTensor] = {}

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
        skip = ~finite
        limit = (self._clip / (norm + 1e-6)).clamp(max=1.0) if self._clip else torch.ones_like(norm)
        if self._guard is not None and self._zclip:
            limit = torch.minimum(limit, self._guard.bound(norm, finite) / (norm + 1e-6))
        if self._guard is not None and self._skips:
            skip = skip | self._guard.is_spike(loss / tokens, norm, finite)
        factor = torch.where(skip, torch.ones_like(norm), limit / tokens)
        return Clipping(norm, factor, skip.float())

    def clip_grad(self, index: int, clipping: Clipping) -> None:
        """Scale the gradient of bucket `index`, for a rule whose kernel does not scale."""
        grad = self.shards[index].bucket.grad
        grad *= clipping.grad_factor.to(grad.dtype)

    def compute_updates(self, clipping: Clipping, lr: float, step: int) -> Tensor | None:
        """Compute what takes more than a shard: directions of whole matrices, on their owners. For a rule that needs
        parameter norms, overwrite all gradients with updates, and return the norms; else return None.

        `step` counts from 1.
        """
        if self._matrices:
            with self._mesh.recorder.action("compute_updates"):
                for matrices in self._matrices.values():
                    matrices.start_gather()
                for matrices in self._matrices.values():
                    matrices.compute(lr, step, clipping.grad_factor, clipping.skip)
        if self._norms is None:
            return None
        with self._mesh.recorder.action("compute_updates"):
            for index, rule in enumerate(self._norm_rules):
                self.clip_grad(index, clipping)
                rule.compute_updates(step, clipping.skip)
            return self._norms.compute()

    def update_shard(self, index: int, clipping: Clipping, norms: Tensor | None, lr: float, step: int) -> None:
        """Update this rank's shard of bucket `index`, with the `norms` of `compute_updates`.

        The bucket's other shards are outdated until `start_param_gather`. If the loss or the gradient norm is not
        finite, nothing changes, not even the gradient: the guard reads the gradient to find the cause.
        """
        if self._norms is not None:
            assert norms is not None, "`compute_updates` comes first"
            self._norm_rules[index].apply_updates(lr, self._norms.for_shard(norms, index), clipping.skip)
        for group, rule in self._rules[index]:
            rule.step(lr * group.lr_mult, step, clipping.grad_factor, clipping.skip)
        if index in self._matrices:
            self._matrices[index].apply(lr, step, clipping.grad_factor, clipping.skip)
        self.shards[index].copy_to_params()

    def state_tensors(self) -> Iterator[tuple[Bucket, str, int, Tensor]]:
        """Yield master weights ("") and state by name of flat ranges, with their start in the bucket."""
        for shard in self.shards:
            yield from ((shard.bucket, name, start, values) for name, start, values in shard.tensors())

    def matrix_tensors(self) -> Iterator[tuple[Bucket, str, str, Tensor]]:
        """Yield the state of the matrices that this rank owns: bucket, matrix, name, and values."""
        for index, matrices in self._matrices.items():
            bucket = self.shards[index].bucket
            yield from ((bucket, place.tensor.name, name, values) for place, name, values in matrices.tensors())

    def global_tensors(self) -> dict[str, GlobalTensor]:
        """Return master weights (`weights.NAME`) and state (`exp_avg.NAME`, ...); see `parallel.stateful.Stateful`."""
        tensors = global_tensors(self.shards, self._mesh)
        for matrices in self._matrices.values():
            tensors |= matrices.global_tensors()
        return tensors

    def flat_tensors(self) -> list[Tensor]:
        flat = [tensor for shard in self.shards for tensor in (shard.master, *shard.state.values())]
        return flat + [values for _, _, _, values in self.matrix_tensors()]

    def begin_load(self, saved: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> dict[str, GlobalTensor]:
        """Return all tensors but state that the checkpoint has of another rule: it begins at zero, and `fresh_state`
        has its names. Full master weights add up the two of compensated ones.
        """
        tensors = self.global_tensors()
        parameters = (slot.parameter for shard in self.shards for slot in shard.bucket.layout.slots)
        fresh = fresh_state(tensors, parameters, self._groups, saved_groups(config))
        fresh += [name for name in tensors if name.startswith(f"{LOW}.") and name not in saved]
        self.fresh_state = {name.partition(".")[0] for name in fresh}
        for name in fresh:
            for shard in tensors.pop(name).shards:
                shard.data.zero_()
        self._rests = begin_with_rests(tensors, saved)
        return tensors | self._rests

    def end_load(self) -> None:
        """All-gather replicated buckets (`zero = 0`), which their data-parallel replicas have read in shares."""
        add_rests(self.global_tensors(), self._rests)
        self._rests = {}
        gather_shares(self.shards)
        self.end_restore()

    def end_restore(self) -> None:
        for matrices in self._matrices.values():
            matrices.note_fresh_state()

    def copy_masters_to_weights(self) -> None:
        """Round master weights into this rank's shards of the weights, after a checkpoint was loaded."""
        for shard in self.shards:
            shard.copy_to_params()


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


def _optimizer_shard(bucket: Bucket, ranges: Sequence[FlatRange], compensated: bool) -> OptimizerShard:
    weights, grad = bucket.shard_weights, bucket.grad
    master = weights if compensated or weights.dtype == grad.dtype else weights.to(grad.dtype)
    by_name = state_ranges(ranges)
    state = {name: grad.new_zeros(sum(stop - start for start, stop in found)) for name, found in by_name.items()}
    if compensated:
        state[LOW] = torch.zeros_like(weights)
    return OptimizerShard(bucket, master, state, by_name)


def _build_rules(
    shard: OptimizerShard, ranges: Sequence[FlatRange], config: OptimizerConfig, rules: Mapping[str, Any]
) -> list[tuple[ParamGroup, Any]]:
    """Build an `Elementwise` rule for every group with elements in a shard."""
    built = []
    groups = [item.group for index, item in enumerate(ranges) if item.group not in [r.group for r in ranges[:index]]]
    for group in groups:
        segments = segments_of(shard, [item for item in ranges if item.group == group])
        rule, options = rules[group.rule], group.all_options
        own = {"name": group.rule, "weight_decay": group.weight_decay, "options": dict(options)}
        settings = config.model_copy(update=own)
        if group.rule == REST and shard.residual is not None:
            rule, options = adam, adam_options(config)
        if isinstance(rule, type):
            if shard.residual is not None:
                problem = f"{group.rule} is a class, which needs master weights in fp32"
                hint = "optimizer.master = full, or a rule that is a function"
                raise ConfigError([Problem("optimizer.name", group.rule, problem, hint)])
            built.append((group, rule(segments, settings)))
        else:
            built.append((group, FunctionRule(segments, settings, rule, options)))
    return built
