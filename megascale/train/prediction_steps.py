"""Multi-token prediction in a step: its targets, and the means of its losses (`PredictionSteps`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megascale.config.model import ModelConfig
from megascale.config.train import TrainConfig
from megascale.parallel.microbatch import DepthTargets, StepBatch
from megascale.plan.account.step_totals import DEPTH_LOSS, vector_name
from megascale.train.run import Hook, Run
from megascale.train.step_totals import StepTotals


class PredictionSteps(Hook):
    """Sums the losses of each depth."""

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        for depth, own in targets_by_depth(run.config.model, totals.batch).items():
            losses = [targets.loss for targets in own if targets.loss is not None]
            totals.add_per_microbatch(**{vector_name(DEPTH_LOSS, depth): torch.stack(losses).sum() if losses else 0.0})


def prediction_metrics(
    model: ModelConfig, train: TrainConfig, totals: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return `StepMetrics.mtp` of the totals of a step."""
    depths, weight = range(model.mtp_layers), train.mtp_loss_weight * totals["tokens"]
    return {f"{d + 1}": {"loss": totals[vector_name(DEPTH_LOSS, d)] * len(depths) / weight} for d in depths}


def targets_by_depth(model: ModelConfig, batch: StepBatch) -> dict[int, list[DepthTargets]]:
    """Return this rank's targets of each depth, by its number from 0; none on ranks before the last stage."""
    parts = [part.depths for part in batch.micro_batches if part.depths]
    return {depth: [targets[depth] for targets in parts] for depth in range(model.mtp_layers)}
