"""Sharded optimizer: master weights and state of this rank's ZeRO shards, and clipping by the global gradient norm.

reduced bucket -> local_sq_norm | all-reduce | compute_clipping | compute_updates | update_shard -> all-gather

Each parameter group (`layout.param_groups`) has a rule, whose card declares its unit of work (`updates_of`). Rules of
elements see the flat ranges of a shard that belong to their groups, rules with parameter norms the parts of parameters,
and rules of whole matrices run on owners.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megascale.catalog.optimizers import MATRIX_UNITS
from megascale.comm.mesh import Mesh
from megascale.config.train import OptimizerConfig
from megascale.device import HostBuffers
from megascale.layout.param_groups import ParamGroups, element_ranges
from megascale.optim.clipping import Clipping, counted_elements, sum_of_squares
from megascale.optim.compensated import KeptUpdates
from megascale.optim.element_updates import ElementUpdates
from megascale.optim.host_updates import HostUpdates
from megascale.optim.optimizer_shard import LOW, gather_shares, global_tensors, new_shard
from megascale.optim.updates import Parts, Rules, Updates
from megascale.parallel.bucket import Bucket
from megascale.parallel.stateful import GlobalTensor, TensorShard

if TYPE_CHECKING:
    from megascale.layout.owners import OwnedMatrix
    from megascale.optim.step_guard import StepGuard


def updates_of(unit_of_work: str) -> type[Updates]:
    """Return what runs the rules of a unit of work."""
    if unit_of_work in MATRIX_UNITS:
        from megascale.optim.matrix_updates import MatrixUpdates

        return MatrixUpdates
    if unit_of_work == "param_norms":
        from megascale.optim.norms import NormUpdates

        return NormUpdates
    return ElementUpdates


class ShardedOptimizer:
    """Clips gradients and updates the shards of this rank's buckets.

    Construct after weights are initialized: master weights copy them. A step has two phases, without host-device
    synchronization. First `local_sq_norm` measures buckets, as their reductions complete; the global norm gives the
    factor of all gradients. Then `update_shard` updates bucket after bucket, and the all-gather of a bucket overlaps
    with the next update. Between the phases a rule with trust ratios computes the updates of all buckets, and rules of
    whole matrices compute theirs.

    `rules`: the rules of all groups by name, as `ops.optimizer` describes them. `guard`: of steps against spikes.
    `host`: the memory of state on the host, None for state on the device; then `config` has a stride. `kept`: what
    rounding keeps of updates, None without compensated weights.
    """

    def __init__(
        self, buckets: Sequence[Bucket], mesh: Mesh, config: OptimizerConfig, rules: Rules,
        guard: StepGuard | None = None, host: HostBuffers | None = None,
    ) -> None:  # fmt: skip
        groups = self._groups = ParamGroups(config)
        self._mesh = mesh
        self._clip = config.clip_norm
        self._zclip, self._skips = config.zclip, config.skip_sigma > 0
        self._guard = guard
        self.shards = [
            new_shard(
                bucket, element_ranges(bucket.layout, groups, mesh.topology, bucket.shard),
                compensated=config.master_weights == "bf16_compensated", host=host,
            )
            for bucket in buckets
        ]  # fmt: skip
        units = (group.facts["unit_of_work"] for group in (groups.default, groups.rest, *groups.listed))
        kinds = dict.fromkeys(HostUpdates if host else updates_of(unit) for unit in units)
        self.kept = KeptUpdates() if config.master_weights == "bf16_compensated" else None
        self.updates = [kind(Parts(self.shards, mesh, config, groups, rules, self.kept, host)) for kind in kinds]
        self.fresh_state: set[str] = set()
        self._rests: dict[str, GlobalTensor] = {}

    def local_sq_norm(self, bucket: Bucket) -> Tensor:
        """Compute this rank's contribution of a bucket to the global squared gradient norm, an f64 device scalar.

        Over the job, every parameter of the model counts once.
        """
        counted = bucket.grad[: counted_elements(bucket, tp=self._mesh.tp.index)]
        return sum_of_squares(counted) if len(counted) else counted.new_zeros((), dtype=torch.float64)

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

    def compute_updates(self, clipping: Clipping, lr: float, step: int) -> None:
        """Compute what takes more than a shard: directions of whole matrices, on their owners, and norms of parameters.

        `step` counts from 1.
        """
        for updates in self.updates:
            updates.compute(lr, step, clipping)

    def update_shard(self, index: int, clipping: Clipping, lr: float, step: int) -> None:
        """Update this rank's shard of bucket `index`, after `compute_updates`.

        The bucket's other shards are outdated until `start_param_gather`. If the loss or the gradient norm is not
        finite, nothing changes, not even the gradient: the guard reads the gradient to find the cause.
        """
        for updates in self.updates:
            updates.apply(index, lr, step, clipping)
        if not all(updates.writes_rounded for updates in self.updates):
            self.shards[index].copy_to_params()

    def matrix_state(self) -> Iterator[tuple[Bucket, OwnedMatrix, str, Tensor]]:
        """Return the state of the matrices that this rank owns: bucket, matrix, name, and values."""
        return itertools.chain.from_iterable(updates.matrix_state() for updates in self.updates)

    def global_tensors(self) -> dict[str, GlobalTensor]:
        """Return master weights (`weights.NAME`) and state (`exp_avg.NAME`, ...); see `parallel.stateful.Stateful`."""
        tensors = global_tensors(self.shards, self._mesh)
        for _, matrix, name, values in self.matrix_state():
            index, stack = matrix.index(self._mesh.topology, self._mesh.coord), matrix.tensor.shape[:-2]
            whole = GlobalTensor((*stack, *values.shape), values.dtype, [])
            offset, size = (*index, *[0] * values.dim()), (*[1] * len(stack), *values.shape)
            shards = tensors.setdefault(f"{name}.{matrix.tensor.name}", whole).shards
            shards.append(TensorShard(offset, size, values.view(size)))
        return tensors

    def flat_tensors(self) -> list[Tensor]:
        flat = [tensor for shard in self.shards for tensor in (shard.master, *shard.state.values())]
        return flat + [values for _, _, _, values in self.matrix_state()]

    def begin_load(self, saved: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> dict[str, GlobalTensor]:
        """Return all tensors but state that the checkpoint has of another rule: it begins at zero, and `fresh_state`
        has its names. Full master weights add up the two of compensated ones.
        """
        from megascale.optim.saved_state import begin_with_rests, fresh_state

        tensors = self.global_tensors()
        parameters = (slot.parameter for shard in self.shards for slot in shard.bucket.layout.slots)
        fresh = fresh_state(tensors, parameters, self._groups, config)
        fresh += [name for name in tensors if name.startswith(f"{LOW}.") and name not in saved]
        self.fresh_state = {name.partition(".")[0] for name in fresh}
        for name in fresh:
            for shard in tensors.pop(name).shards:
                shard.data.zero_()
        self._rests = begin_with_rests(tensors, saved)
        return tensors | self._rests

    def end_load(self) -> None:
        """All-gather replicated shards (`zero = 0`), which their data-parallel replicas have read in shares."""
        if self._rests:
            from megascale.optim.saved_state import add_rests

            add_rests(self.global_tensors(), self._rests)
            self._rests = {}
        gather_shares(self.shards)
        self.end_restore()

    def end_restore(self) -> None:
        for updates in self.updates:
            updates.end_restore()

    def copy_masters_to_weights(self) -> None:
        """Round master weights into this rank's shards of the weights, after a checkpoint was loaded."""
        for shard in self.shards:
            shard.copy_to_params()
