"""The training step: forward, backward, reductions, clipping, optimizer and parameter all-gather (paper, 3.2).

    compute   F B F B ... F B   norms 0 ... n   update 0   update 1   ...
    comm              reduce 0 ... n     totals          gather 0   gather 1   ...     (0 ... n: buckets)
    host      runs ahead of the device; reads the totals once, during update 0

A step that is not finite raises before the first parameter all-gather, and the optimizer skips its updates.
"""

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
from megascale.core.errors import NoLossTokensError
from megascale.core.flight_layout import Phase
from megascale.device import Mark
from megascale.parallel.microbatch import StepBatch
from megascale.train.finite_check import check_step_finite

if TYPE_CHECKING:
    from megascale.train.build import Run

POLL_INTERVAL_S = 1e-4
"""Polling interval for a device with queued work, in seconds."""


@dataclass(frozen=True)
class StepResult:
    """Results of a step, equal on all ranks.

    `loss`: mean per token. `grad_norm`: norm of the mean gradient before clipping. `stop`: a rank has a stop request.
    `ranks_written`, `ranks_failed`: ranks that have completed or failed their part of the save in progress.
    """

    loss: float
    grad_norm: float
    loss_tokens: int
    lr: float
    stop: bool
    ranks_written: float = 0.0
    ranks_failed: float = 0.0


def train_step(run: Run, batch: StepBatch) -> StepResult:
    """Train on one global batch. The host waits for the device once, to read seven values during the update.

    Raises, on every rank and before any update: DivergenceError if the loss or a gradient is not finite,
    NoLossTokensError if no label of the batch counts in the loss.
    """
    recorder, step = run.mesh.recorder, run.progress.step + 1
    recorder.step = step
    run.buffers.begin_step()
    run.fp8_state.begin_step(collect_stats=run.config.fp8.monitor and is_logged_step(run.config.train, step))
    loss = run.pipeline.run_actions(run.train_order, batch)  # sum over this rank's tokens
    run.fp8_state.update_history()
    with recorder.action("grad_norm"):  # a bucket's norm overlaps the reductions of later buckets
        sq_norm = sum(
            (run.optimizer.local_sq_norm(bucket) for bucket in run.buffers.finish_reductions()),
            loss.new_zeros(()).double(),
        )
    sums = reduce_totals(
        run.mesh, loss, batch.loss_tokens, float(run.stop.requested), *run.checkpoints.poll_save(), sq_norm
    )
    clipping = run.optimizer.compute_clipping(sums[5], tokens=sums[1], loss=sums[0])
    lr, read_totals = run.lr(step), run.device.copy_to_host(torch.stack([*sums[:5], clipping.norm, loss.double()]))
    read_mark = recorder.mark()
    norms = run.optimizer.compute_updates(clipping, step)  # parameter norms, for LAMB; None for AdamW
    for index, bucket in enumerate(run.buffers.buckets):  # in the order of the next forward
        with recorder.action("update", bucket.chunk):  # skipped on the device if a sum is not finite
            run.optimizer.update_shard(index, clipping, norms, lr, step)
        if index == 0:  # before the all-gather overwrites a bad weight; the device is busy meanwhile
            _work_before_read(run, read_mark)
            with recorder.flight.device_wait():
                totals = read_totals()
            _check_totals(run, totals)
        run.buffers.start_param_gather(bucket)  # overlaps the next update and the next batch's loading
    recorder.step = 0  # events between steps belong to step 0
    with recorder.flight.device_wait():
        total, tokens, stops, written, failed, norm, _ = read_totals()
    run.progress.step = step
    run.progress.samples += run.config.batch.total
    run.progress.tokens += int(tokens)
    return StepResult(total / tokens, norm, int(tokens), lr, stops > 0, written, failed)


def is_logged_step(settings: TrainConfig, step: int) -> bool:
    """Return True if the step's metrics are written."""
    return step % settings.log_every == 0 or step in (1, settings.steps)


def reduce_totals(mesh: Mesh, loss: Tensor, tokens: int, *extra: float | Tensor) -> Tensor:
    """All-reduce loss, tokens and `extra` values over the job in fp64 on the device. Returns [2 + len(extra)].

    Loss and tokens count once per micro-batch, on tp rank 0 of the last pipeline stage; `extra` on every rank.
    """
    has_loss = mesh.coord.pp == mesh.topology.pp - 1 and mesh.coord.tp == 0
    values = torch.zeros(2 + len(extra), dtype=torch.float64, device=loss.device)
    for place, value in zip(values, (loss if has_loss else 0.0, tokens if has_loss else 0.0, *extra), strict=True):
        if isinstance(value, Tensor):
            place.copy_(value)
        else:
            place.fill_(value)  # `values[index] = value` would copy from the host and wait for the device
    sum_over_job(mesh, values, label="totals")
    return values


def _work_before_read(run: Run, until: Mark) -> None:
    """Prefetch the next batch and release sent tensors while the device works up to the mark `until`.

    On a CPU the host computes by itself: no wait to fill, so the next batch is read during the parameter all-gather.
    """
    recorder, step = run.mesh.recorder, run.progress.step + 1
    if recorder.timer.synchronous:
        return
    if step < run.config.train.steps:
        with recorder.flight.phase(Phase.DATA):
            run.train_loader.prefetch(run.progress.samples + run.config.batch.total)
    while recorder.has_backlog(until):
        run.pipeline.release_sent()
        time.sleep(POLL_INTERVAL_S)


def _check_totals(run: Run, values: Sequence[float]) -> None:
    """Check `values` = (total loss, tokens, ..., gradient norm, this rank's part of the loss)."""
    total, tokens, *_, norm, local_loss = values
    check_loss_tokens(tokens)
    check_step_finite(run, local_loss, total, norm)


def check_loss_tokens(tokens: float) -> None:
    """Raises: NoLossTokensError if `tokens` is zero."""
    if not tokens:
        raise NoLossTokensError("no label of this batch counts in the loss", hint="check the loss masks of the data")
