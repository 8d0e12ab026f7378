"""One training step. It reads like section 3.2 of the paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.comm.mesh import Mesh
from megascale.core.errors import DataError
from megascale.data.loader import StepBatch
from megascale.train.guard import check_finite

if TYPE_CHECKING:
    from megascale.train.build import Run


@dataclass(frozen=True)
class StepResult:
    """What a step did: mean loss a token, norm of the mean gradient before clipping, tokens, learning rate; and whether
    some rank was asked to stop.
    """

    loss: float
    grad_norm: float
    tokens: int
    lr: float
    stop: bool


def train_step(run: Run, batch: StepBatch) -> StepResult:
    """Train on one global batch.

    Raises: DivergenceError before anything is updated if the loss or a gradient is not finite.
    """
    run.gradients.clear()
    loss = run.pipeline.run(run.train_order, batch)  # sum over this rank's tokens, not yet divided
    run.gradients.finish()  # every chunk's reduction but the last is done already
    total, tokens, stops = totals(run.mesh, loss, batch.tokens, run.stop.asked)
    norm = run.optimizer.scale_and_clip(1 / tokens)
    check_finite(run, float(loss), total, norm)
    lr = run.lr(run.progress.step + 1)
    run.optimizer.step(lr, run.progress.step + 1)  # this rank's shards
    run.gradients.start_gather()  # the first hides behind the next batch's loading
    run.progress.step += 1
    run.progress.samples += run.config.batch.total
    run.progress.tokens += int(tokens)
    return StepResult(total / tokens, norm, int(tokens), lr, stop=stops > 0)


def totals(mesh: Mesh, loss: Tensor, tokens: int, stop: bool = False) -> tuple[float, float, float]:
    """Sums over the job, in one reduction: losses and tokens of the micro-batches, each counted where its loss is
    formed, and the ranks that were asked to stop.

    Raises: DataError on every rank if no label of the samples counts.
    """
    last_stage = mesh.coord.pp == mesh.topology.pp - 1
    counts = last_stage and mesh.coord.tp == 0
    values = torch.tensor([0.0, tokens if counts else 0.0, float(stop)], dtype=torch.float64, device=loss.device)
    if counts:
        values[0] = loss
    all_reduce(mesh.world, values)
    total, count, stops = values.tolist()
    if not count:
        raise DataError("no label of this batch counts in the loss", mend="look at the loss masks of the data")
    return total, count, stops
