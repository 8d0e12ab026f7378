"""Losses of early exits in a step: their weights, which warm up (EE-LLM, arXiv 2312.04916), and their means."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megascale.config.model import ModelConfig
from megascale.config.train import TrainConfig
from megascale.parallel.microbatch import ExitLoss, StepBatch
from megascale.plan.account.step_totals import EXIT_LOSS, vector_name
from megascale.train.run import Hook, Run
from megascale.train.step_totals import StepTotals


class ExitLosses(Hook):
    """Weights the losses of exits, and sums them."""

    def batch_read(self, run: Run, batch: StepBatch) -> None:
        weights = exit_weights(run.config.model, run.config.train, run.progress.step + 1)
        for part in batch.micro_batches:
            part.exits.update({after: ExitLoss(weight) for after, weight in weights.items()})

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        for after in run.config.model.exits:
            found = [part.exits[after].total for part in totals.batch.micro_batches]
            own = [total for total in found if total is not None and run.mesh.coord.tp == 0]
            totals.add(**{vector_name(EXIT_LOSS, after): torch.stack(own).sum() if own else 0.0})


def exit_weights(model: ModelConfig, train: TrainConfig, step: int) -> dict[int, float]:
    """Return the weight of each exit's loss in a step, from 1, by the number of layers before the exit."""
    given, share = train.exit_loss_weight, min(1.0, step / max(1, train.exit_warmup_steps))
    weights = given if isinstance(given, list) else [given] * len(model.exits)
    return {after: share * weight for after, weight in zip(model.exits, weights, strict=True)}


def exit_metrics(
    model: ModelConfig, train: TrainConfig, step: int, totals: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return `StepMetrics.exits` of the totals of a step."""
    weights = exit_weights(model, train, step)
    return {f"{n}": {"loss": totals[vector_name(EXIT_LOSS, n)] / (w * totals["tokens"])} for n, w in weights.items()}
