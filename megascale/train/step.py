"""One training step. It reads like section 3.2 of the paper."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megascale.comm.mesh import Mesh
from megascale.comm.totals import sum_over_job
from megascale.config.train import TrainConfig
from megascale.core.errors import UncountedError
from megascale.device import Mark
from megascale.parallel.microbatch import StepBatch
from megascale.train.guard import check_finite

if TYPE_CHECKING:
    from megascale.train.build import Run

POLL = 1e-4
"""Seconds between two looks at a device that has much to do."""


@dataclass(frozen=True)
class StepResult:
    """What a step did: mean loss a token, norm of the mean gradient before clipping, tokens, learning rate; whether
    some rank was asked to stop; and how many ranks have written, or failed to write, their part of a checkpoint.
    """

    loss: float
    grad_norm: float
    tokens: int
    lr: float
    stop: bool
    written: float = 0.0
    failed: float = 0.0


def train_step(run: Run, batch: StepBatch) -> StepResult:
    """Train on one global batch. The host waits once, for seven numbers, while the device updates.

    Raises: on every rank DivergenceError if the loss or a gradient is not finite, UncountedError if no label of the
    samples counts; then nothing was updated.
    """
    recorder, step = run.mesh.recorder, run.progress.step + 1
    recorder.step = step
    run.gradients.clear()
    run.scaling.begin(watch=run.config.fp8.monitor and logged(run.config.train, step))
    loss = run.pipeline.run(run.train_order, batch)  # sum over this rank's tokens, not yet divided
    run.scaling.finish()
    with recorder.action("norms"):  # of each bucket while the others are still being reduced; all but the last are done
        square = sum((run.optimizer.square(bucket) for bucket in run.gradients.finish()), loss.new_zeros(()).double())
    sums = totals(run.mesh, loss, batch.tokens, float(run.stop.asked), *run.checkpoints.poll(), square)
    clipping = run.optimizer.clipping(sums[5], tokens=sums[1], loss=sums[0])
    lr, numbers = run.lr(step), run.device.read(torch.stack([*sums[:5], clipping.norm, loss.double()]))
    asked = recorder.mark()
    norms = run.optimizer.direct(clipping, step)  # of whole parameters, where the update is scaled by them
    for index, bucket in enumerate(run.gradients.buckets):  # in the order in which the next step needs them
        with recorder.action("update", bucket.chunk):  # of this rank's shard, and of nothing if a sum is not finite
            run.optimizer.update(index, clipping, norms, lr, step)
        if index == 0:  # before another rank's weights cover what is wrong with ours; the device is busy meanwhile
            _use_wait(run, asked)
            _check(run, numbers())
        run.gradients.start_gather(bucket)  # hidden behind the next update, and the next batch's loading
    recorder.step = 0  # until the next one
    total, tokens, stops, written, failed, norm, _ = numbers()
    run.progress.step = step
    run.progress.samples += run.config.batch.total
    run.progress.tokens += int(tokens)
    return StepResult(total / tokens, norm, int(tokens), lr, stops > 0, written, failed)


def logged(settings: TrainConfig, step: int) -> bool:
    """Whether a step's figures are written."""
    return step % settings.log_every == 0 or step in (1, settings.steps)


def totals(mesh: Mesh, loss: Tensor, tokens: int, *more: float | Tensor) -> Tensor:
    """Sums over the job, all at once and on the device, f64: losses and tokens of the micro-batches, each counted
    where its loss is formed, and `more` numbers of every rank.
    """
    counts = mesh.coord.pp == mesh.topology.pp - 1 and mesh.coord.tp == 0
    values = torch.zeros(2 + len(more), dtype=torch.float64, device=loss.device)
    for place, value in zip(values, (loss if counts else 0.0, tokens if counts else 0.0, *more), strict=True):
        if isinstance(value, Tensor):
            place.copy_(value)
        else:
            place.fill_(value)  # `values[index] = value` would copy it from the host, and wait for the device
    sum_over_job(mesh, values, what="totals")
    return values


def _use_wait(run: Run, until: Mark) -> None:
    """Do what would delay the next step, before the host waits for its device to come to `until`. A host that computes
    has no wait to use: it reads the next batch later, while weights are gathered.
    """
    recorder, step = run.mesh.recorder, run.progress.step + 1
    if recorder.timer.host:
        return
    if step < run.config.train.steps:
        run.train.read_ahead(run.progress.samples + run.config.batch.total)
    while recorder.trails(until):
        run.pipeline.release()
        time.sleep(POLL)


def _check(run: Run, numbers: Sequence[float]) -> None:
    """The first are the total loss and the tokens, the last the norm and this rank's part of the loss."""
    total, tokens, *_, norm, own = numbers
    check_counted(tokens)
    check_finite(run, own, total, norm)


def check_counted(tokens: float) -> None:
    """Raises: UncountedError if no label of a batch counts."""
    if not tokens:
        raise UncountedError("no label of this batch counts in the loss", mend="look at the loss masks of the data")
