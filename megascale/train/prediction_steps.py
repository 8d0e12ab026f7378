"""Multi-token prediction in a step: the constants of its losses, and their means (`PredictionSteps`).

The loss of depth d of D is weight / D x the mean over the N_d targets of the step: a sum over targets times the
constant weight / D x N / N_d, as clipping divides by the N labels of the step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megascale.config.model import ModelConfig
from megascale.config.train import TrainConfig
from megascale.parallel.microbatch import DepthTargets, StepBatch
from megascale.plan.account.step_totals import DEPTH_LOSS, DEPTH_TARGETS, vector_name
from megascale.train.run import Hook, Run
from megascale.train.step_totals import StepTotals


class PredictionSteps(Hook):
    """Counts the targets of each depth before a step, and sums its losses after it."""

    def batch_read(self, run: Run, batch: StepBatch) -> None:
        """Give the targets of each depth their constant: 0 for a depth without any in the step."""
        totals = StepTotals(run.mesh, run.device.torch_device, batch)
        by_depth = _by_depth(run.config.model, batch)
        counts = {vector_name(DEPTH_TARGETS, depth): sum(t.count for t in own) for depth, own in by_depth.items()}
        totals.add_per_microbatch(tokens=batch.loss_tokens, **counts)
        sums = totals.reduce("targets of the step")
        share = run.config.train.mtp_loss_weight / len(by_depth)
        for own, name in zip(by_depth.values(), counts, strict=True):
            constant = torch.where(sums[name] > 0, share * sums["tokens"] / sums[name], 0.0)
            for targets in own:
                targets.constant = constant

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        for depth, own in _by_depth(run.config.model, totals.batch).items():
            losses = [targets.loss for targets in own if targets.loss is not None]
            totals.add_per_microbatch(**{vector_name(DEPTH_LOSS, depth): torch.stack(losses).sum() if losses else 0.0})


def prediction_metrics(
    model: ModelConfig, train: TrainConfig, totals: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return `StepMetrics.mtp` of the totals of a step."""
    depths, weight = range(model.mtp_layers), train.mtp_loss_weight * totals["tokens"]
    return {f"{d + 1}": {"loss": totals[vector_name(DEPTH_LOSS, d)] * len(depths) / weight} for d in depths}


def _by_depth(model: ModelConfig, batch: StepBatch) -> dict[int, list[DepthTargets]]:
    """This rank's targets of each depth, by its number from 0; none on ranks before the last stage."""
    parts = [part.depths for part in batch.micro_batches if part.depths]
    return {depth: [targets[depth] for targets in parts] for depth in range(model.mtp_layers)}
