"""Checks that loss, gradients and state are finite, before an update or a save; errors name the first cause."""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megascale.comm.totals import sum_over_job
from megascale.config.model import ModelConfig
from megascale.core.errors import DivergenceError
from megascale.layout.parameters import all_params
from megascale.parallel.bucket import Bucket

if TYPE_CHECKING:
    from megascale.train.run import Run


@dataclass(frozen=True)
class NonFiniteReport:
    """Non-finite values on one rank.

    `reduced_from`: by bucket, the first of the ranks whose gradients are summed. `nonfinite_grads`: parameter name to
    bucket index, for reduced gradients that are not finite in this rank's shard. `nonfinite_buckets`: buckets that were
    not finite before the reduction, which hides the source rank. `incomplete`: some buckets were checked for norms and
    biases only, so `nonfinite_buckets` may lack entries.
    """

    rank: int
    host: str
    reduced_from: list[int]
    local_loss: float
    nonfinite_weights: list[str]
    nonfinite_grads: dict[str, int]
    nonfinite_buckets: list[int]
    incomplete: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


def check_step_finite(run: Run, local_loss: float, total_loss: float, norm: float) -> None:
    """Check the step's loss and gradient norm, which are equal on all ranks.

    `local_loss`: this rank's part of `total_loss`; `norm`: the global gradient norm.
    Raises: DivergenceError on every rank, with step, rank and parameter.
    """
    if math.isfinite(total_loss) and math.isfinite(norm):
        return
    buckets, weights = list(enumerate(run.buffers.trained)), run.buffers.buckets
    report = NonFiniteReport(
        rank=run.mesh.rank,
        host=socket.gethostname(),
        reduced_from=[bucket.group.ranks[0] for _, bucket in buckets],
        local_loss=local_loss,
        nonfinite_weights=[name for b in weights for name in _nonfinite_params(b, b.weights, b.storage.held[0])],
        nonfinite_grads={name: i for i, b in buckets for name in _nonfinite_params(b, b.grad, b.shard[0])},
        nonfinite_buckets=[i for i, b in buckets if b.group.size == 1 or not b.storage.local_grad_finite()],
        incomplete=any(bucket.storage.checks_vectors_only for _, bucket in buckets),
    )
    reports_of_ranks = run.mesh.world.control.all_gather(asdict(report), "non-finite values")
    reports = [NonFiniteReport(**fields) for fields in reports_of_ranks]
    raise DivergenceError(
        f"step {run.progress.step + 1}: {_first_cause(reports, run.config.model)}; nothing was updated or saved",
        ranks=[report.rank for report in reports if report.nonfinite_weights][:1],
        hint=f"lower optimizer.lr, or check the samples of this step; {known_state(run, run.progress.step + 1)}",
    )


def check_state_finite(run: Run) -> None:
    """Check master weights and optimizer state before a save, to keep the last checkpoint usable.

    Raises: DivergenceError on every rank, with step, rank and parameter.
    """
    flat = [(shard.bucket, start, values) for shard in run.optimizer.shards for _, start, values in shard.tensors()]
    place = run.mesh.topology, run.mesh.coord
    matrices = [(matrix.name(*place), values) for _, matrix, _, values in run.optimizer.matrix_state()]
    values_of = [*(values for _, _, values in flat), *(values for _, values in matrices)]
    nonfinite = torch.stack([~all_finite(values).to(run.device.torch_device) for values in values_of]).sum()
    sum_over_job(run.mesh, nonfinite, label="non-finite state")
    if not bool(nonfinite):
        return
    found = (name for bucket, start, values in flat for name in _nonfinite_params(bucket, values, start))
    found_matrices = (name for name, values in matrices if not bool(all_finite(values)))
    bad = next(itertools.chain(found, found_matrices), "")
    names_of_ranks = run.mesh.world.control.all_gather(bad, "non-finite state")
    rank, name = next((rank, name) for rank, name in enumerate(names_of_ranks) if name)
    raise DivergenceError(
        f"step {run.progress.step}: {name} or its optimizer state is not finite on rank {rank}; nothing was saved",
        ranks=[rank],
        hint=f"lower optimizer.lr; {known_state(run, run.progress.step)}",
    )


def known_state(run: Run, failed_step: int) -> str:
    """Say what this process knows of the state to go back to: the newest checkpoint, or what the run began with.

    Both were checked to be finite, and every step between them and `failed_step` was. A finite state may be the cause
    all the same: weights of 1e30 are finite.
    """
    step, name = run.checkpoints.newest_step, run.origin.name
    if step is not None:
        name = f"the checkpoint of step {step}"
    elif not name:
        return "this run has no checkpoint yet"
    steps = failed_step - 1 - (run.origin.step if step is None else step)
    if not steps:
        return f"this is the first step from {name}, finite itself, but perhaps the cause"
    after = "the step" if steps == 1 else f"the {steps} steps"
    return f"{name} and {after} after it were finite"


def all_finite(values: Tensor) -> Tensor:
    """Return a bool tensor on the values' device: True if all are finite.

    min and max propagate NaN and take one read, while isfinite() also writes a tensor of the same size.
    """
    return torch.stack(values.aminmax()).isfinite().all()


def _nonfinite_params(bucket: Bucket, values: Tensor, start: int) -> list[str]:
    """Names of parameters with a non-finite element in `values` [n], which begin at `start` in the bucket."""
    ranges = bucket.layout.param_ranges(start, start + values.numel())
    return [item.slot.parameter.name for item in ranges if not bool(all_finite(item.view(values, start)))]


def _first_cause(reports: Sequence[NonFiniteReport], model: ModelConfig) -> str:
    """Describe the first cause in the reports: a weight, else a loss, else a gradient."""
    for report in reports:
        if report.nonfinite_weights:
            return f"{report.nonfinite_weights[0]} has a weight that is not finite on {report}"
    grad_text = _first_nonfinite_grad(reports, model)
    for report in reports:
        if not math.isfinite(report.local_loss):
            return f"the loss is {report.local_loss} on {report}" + (
                f"; {grad_text} is not finite" if grad_text else ""
            )
    return f"{grad_text or 'the sum of all gradients'} is not finite"


def _first_nonfinite_grad(reports: Sequence[NonFiniteReport], model: ModelConfig) -> str:
    """Describe the last parameter in network order with a non-finite gradient, and the possible source ranks.

    The backward runs in reverse order and propagates a non-finite value to all earlier layers.
    """
    order = {parameter.name: position for position, parameter in enumerate(all_params(model))}
    nonfinite = {(order[name], name) for report in reports for name in report.nonfinite_grads}
    if not nonfinite:
        return ""
    _, name = max(nonfinite)
    holders = [report for report in reports if name in report.nonfinite_grads]
    places = {(report.nonfinite_grads[name], report.reduced_from[report.nonfinite_grads[name]]) for report in holders}
    peers = [(r, bucket) for r in reports for bucket in set(enumerate(r.reduced_from)) & places]
    sources = [r for r, (bucket, _) in peers if bucket in r.nonfinite_buckets]
    unchecked = [r for r, _ in peers if r.incomplete]
    first, *rest = sources or unchecked or holders
    return f"the gradient of {name} on {first}" + (f" and {len(rest)} more" if rest else "")
