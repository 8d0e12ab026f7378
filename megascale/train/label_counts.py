"""The labels of a step, counted before its forwards (`LabelCounts`): the constants of the losses of routers and of MTP.

The loss of depth d of D is weight / D x the mean over the N_d targets of the step: a sum over targets times the
constant weight / D x N / N_d, as clipping divides by the N labels of the step.
"""

from __future__ import annotations

import torch

from megascale.config.batch_rampup import batch_sizes
from megascale.parallel.experts.router_losses import RouterLosses
from megascale.parallel.microbatch import StepBatch
from megascale.plan.account.step_totals import DEPTH_TARGETS, vector_name
from megascale.train.prediction_steps import targets_by_depth
from megascale.train.run import Hook, Run
from megascale.train.step_totals import StepTotals


class LabelCounts(Hook):
    """Counts the labels of a step and the targets of each depth in one sum. `losses`: of the routers."""

    def __init__(self, losses: RouterLosses | None) -> None:
        self._losses = losses

    def batch_read(self, run: Run, batch: StepBatch) -> None:
        """Give the targets of each depth their constant: 0 for a depth without any in the step."""
        totals = StepTotals(run.mesh, run.device.torch_device, batch)
        by_depth = targets_by_depth(run.config.model, batch)
        counts = {vector_name(DEPTH_TARGETS, depth): sum(t.count for t in own) for depth, own in by_depth.items()}
        totals.add_per_microbatch(tokens=batch.loss_tokens, **counts)
        sums = totals.reduce("labels of the step")
        if self._losses is not None:
            self._losses.loss_tokens = sums["tokens"]
            self._losses.samples = batch_sizes(run.config.batch).at(run.progress.samples)
        for own, name in zip(by_depth.values(), counts, strict=True):
            share = run.config.train.mtp_loss_weight / len(by_depth)
            constant = torch.where(sums[name] > 0, share * sums["tokens"] / sums[name], 0.0)
            for targets in own:
                targets.constant = constant
