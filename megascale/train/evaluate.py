"""Loss on validation data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megascale.trace.record import EvaluationRecord
from megascale.train.step import check_counted, totals

if TYPE_CHECKING:
    from megascale.train.build import Run


def evaluate(run: Run) -> EvaluationRecord:
    """The mean loss a token over the same validation batches each time, without dropout."""
    assert run.valid is not None, "a run that evaluates has validation data"
    run.scaling.refresh()
    loss = torch.zeros((), dtype=run.formats[1], device=run.device.torch)
    tokens = 0
    for batch in run.valid.batches(run.valid_batches):
        loss += run.pipeline.run(run.valid_order, batch)
        tokens += batch.tokens
        run.mesh.recorder.settle()  # else marks, which hold a GPU's events, pile up beside the ring
    total, count = run.device.read(totals(run.mesh, loss, tokens))()
    check_counted(count)
    return EvaluationRecord(run.progress.step, total / count, int(count))
