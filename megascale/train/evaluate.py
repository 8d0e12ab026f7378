"""Evaluation: the loss on validation data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megascale.trace.metrics import EvaluationMetrics
from megascale.train.step import check_loss_tokens, reduce_totals

if TYPE_CHECKING:
    from megascale.train.build import Run


def evaluate(run: Run) -> EvaluationMetrics:
    """Compute the mean loss per token over a fixed set of validation batches, without dropout."""
    assert run.valid_loader is not None, "a run that evaluates has validation data"
    run.fp8_state.invalidate_weights()
    loss = torch.zeros((), dtype=run.dtypes[1], device=run.device.torch_device)
    tokens = 0
    for batch in run.valid_loader.batches(run.valid_batches):
        loss += run.pipeline.run_actions(run.valid_order, batch)
        tokens += batch.loss_tokens
        run.mesh.recorder.resolve_marks()  # bounds the number of open marks, which hold CUDA events
    total, count = run.device.copy_to_host(reduce_totals(run.mesh, loss, tokens))()
    check_loss_tokens(count)
    return EvaluationMetrics(run.progress.step, total / count, int(count))
