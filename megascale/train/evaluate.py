"""Evaluation: the loss on validation data, and the hook that evaluates when due."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megascale.core.errors import NoLossTokensError
from megascale.parallel.microbatch import StepBatch
from megascale.record.layout import Phase
from megascale.record.metrics import EvaluationMetrics
from megascale.train.run import Hook
from megascale.train.step_totals import StepTotals

if TYPE_CHECKING:
    from megascale.train.reporter import Reporter
    from megascale.train.run import Run, StepResult


def evaluate(run: Run, batches: int | None = None, logit_radius: float = 0.0) -> EvaluationMetrics:
    """Compute the mean loss per token over the first validation batches, by default those of the run, without dropout.
    `logit_radius`: of the box around the logits at whose worst point the loss is taken.
    """
    batches = batches or run.valid_batches
    assert run.valid_loader is not None, "a run that evaluates has validation data"
    if run.fp8_state is not None:
        run.fp8_state.invalidate_weights()
    loss = torch.zeros((), dtype=run.dtypes[1], device=run.device.torch_device)
    tokens = 0.0
    for read in run.valid_loader.batches(batches):
        batch = StepBatch([replace(part, logit_radius=logit_radius) for part in read.micro_batches])
        loss += run.pipeline.run_actions(run.order_of(len(batch.micro_batches), False), batch)
        tokens += batch.loss_tokens
        run.mesh.recorder.resolve_marks()  # bounds the number of open marks, which hold CUDA events
    totals = StepTotals(run.mesh, loss.device)
    totals.add_per_microbatch(loss=loss, tokens=tokens)
    sums = totals.reduce()
    total, count = run.device.copy_to_host(torch.stack([sums["loss"], sums["tokens"]]))()
    if not count:
        what = f"no label of the {batches} validation batches counts in the loss"
        raise NoLossTokensError(what, hint="other data.valid or data.split, or train.eval_every = 0")
    return EvaluationMetrics(run.progress.step, total / count, int(count))


class Evaluations(Hook):
    """Evaluates before the first step of a run, every `train.eval_every` steps, and after the last step."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def run_begins(self, run: Run) -> None:
        if run.valid_loader is not None and run.progress.step == 0:
            self._evaluate(run)

    def step_ends(self, run: Run, result: StepResult) -> None:
        settings, step = run.config.train, run.progress.step
        if run.valid_loader is not None and (step % settings.eval_every == 0 or step == settings.steps):
            self._evaluate(run)

    def _evaluate(self, run: Run) -> None:
        with run.mesh.recorder.activity(Phase.EVALUATION):
            metrics = evaluate(run)
            if run.average is not None and run.average.has_begun:
                with run.average.in_place_of_weights(run.buffers):
                    metrics = replace(metrics, averaged_loss=evaluate(run).valid_loss)
                if run.fp8_state is not None:  # casts of the average
                    run.fp8_state.invalidate_weights()
            self._reporter.write(metrics)
        run.hooks.evaluation_ends(run, metrics)
