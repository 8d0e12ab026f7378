"""The training step: forward, backward, reductions, clipping, optimizer and parameter all-gather (paper, 3.2).

    compute   F B F B ... F B   norms 0 ... n   update 0   update 1   ...
    comm              reduce 0 ... n     totals          gather 0   gather 1   ...     (0 ... n: buckets)
    host      runs ahead of the device; reads the totals once, during update 0; the other updates hide its next batch

A step that is not finite raises before the first parameter all-gather, and the optimizer skips its updates.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from megascale.config.train import TrainConfig
from megascale.device import Mark
from megascale.parallel.microbatch import StepBatch
from megascale.record.layout import Phase
from megascale.train.finite_check import check_step_finite
from megascale.train.run import Run, StepResult
from megascale.train.step_totals import StepTotals

POLL_INTERVAL_S = 1e-4  # polling interval for a device with queued work, in seconds


def train_step(run: Run, batch: StepBatch) -> StepResult:
    """Train on one global batch. The host waits for the device once, to read the totals during the update.

    Raises: DivergenceError on every rank and before any update, if the loss or a gradient is not finite
    """
    recorder, step = run.mesh.recorder, run.progress.step + 1
    recorder.step = step
    run.buffers.begin_step()
    run.step_hooks.step_begins(run)
    run.step_hooks.batch_read(run, batch)
    order = run.order_of(len(batch.micro_batches), True)
    loss = run.pipeline.run_actions(order, batch)  # sum over this rank's tokens
    run.step_hooks.backwards_end(run)
    with recorder.action("grad_norm"):  # a bucket's norm overlaps the reductions of later buckets
        norms = {bucket: run.optimizer.local_sq_norm(bucket) for bucket in run.buffers.finish_reductions()}
        sq_norm = sum((norms[bucket] for bucket in run.buffers.trained), loss.new_zeros(()).double())
    sums = _local_totals(run, batch, loss, sq_norm).reduce()
    clipping = run.optimizer.compute_clipping(sums.pop("sq_norm"), tokens=sums["tokens"], loss=sums["loss"])
    on_device = sums | {"grad_norm": clipping.norm, "local_loss": loss.double(), "skipped": clipping.skip.double()}
    lr, read_values = run.lr(step), run.device.copy_to_host(torch.stack([*on_device.values()]))
    read_mark = recorder.mark()
    run.optimizer.compute_updates(clipping, lr, step)
    for index, bucket in enumerate(run.buffers.buckets):  # in the order of the next forward
        with recorder.action("update", bucket.chunk):  # skipped on the device if a sum is not finite
            run.optimizer.update_shard(index, clipping, lr, step)
        if index == 0:  # before the all-gather overwrites a bad weight; the device is busy meanwhile
            _work_before_read(run, read_mark)
            with recorder.log.device_wait():
                totals = dict(zip(on_device, read_values(), strict=True))
            if not totals["tokens"]:  # the mean gradient is 0 / 0, and the updates are skipped on the device
                totals["grad_norm"] = 0.0
            check_step_finite(run, totals["local_loss"], totals["loss"], totals["grad_norm"])
        if not bucket.frozen:
            run.buffers.start_param_gather(bucket)  # overlaps the next update and the next batch's loading
    recorder.step = 0  # events between steps belong to step 0
    tokens = totals["tokens"]
    tokens = tokens if tokens % 1 else int(tokens)  # a sum of weights is no whole number
    run.progress.step = step
    run.progress.samples += run.config.step_samples.at(run.progress.samples)
    run.progress.tokens += tokens
    mean = totals["loss"] / tokens if tokens else math.nan
    result = StepResult(mean, totals["grad_norm"], tokens, lr, totals)
    run.step_hooks.step_ends(run, result)
    return result


def is_logged_step(settings: TrainConfig, step: int) -> bool:
    """Return True if the step's metrics are written."""
    return step % settings.log_every == 0 or step in (1, settings.steps)


def _local_totals(run: Run, batch: StepBatch, loss: Tensor, sq_norm: Tensor) -> StepTotals:
    """Return this rank's parts of the totals of a step."""
    totals, (written, failed) = StepTotals(run.mesh, loss.device, batch), run.checkpoints.poll_save()
    totals.add_per_microbatch(loss=loss, tokens=batch.loss_tokens)
    run.step_hooks.add_totals(run, totals)
    totals.add(stops=float(run.stop.requested), ranks_written=written, ranks_failed=failed, sq_norm=sq_norm)
    run.hooks.add_totals(run, totals)
    return totals


def _work_before_read(run: Run, until: Mark) -> None:
    """Prefetch the next batch and release sent tensors while the device works up to the mark `until`.

    On a CPU the host computes by itself: no wait to fill, so the next batch is read during the parameter all-gather.
    """
    recorder, step = run.mesh.recorder, run.progress.step + 1
    if recorder.timer.synchronous:
        return
    if step < run.config.train.steps:
        with recorder.activity(Phase.DATA, until=until):
            samples = run.progress.samples
            run.train_loader.prefetch(samples + run.config.step_samples.at(samples))
    while recorder.has_backlog(until):
        run.pipeline.release_sent()
        time.sleep(POLL_INTERVAL_S)
