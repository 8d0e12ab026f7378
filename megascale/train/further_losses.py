"""The losses of a step beside that of the next token: of early exits, with weights that warm up (EE-LLM, arXiv
2312.04916), of multi-token prediction, and those with a count of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megascale.config.model import ModelConfig
from megascale.config.train import TrainConfig
from megascale.layout.tensors import exit_name
from megascale.parallel.microbatch import StepBatch
from megascale.plan.account.step_totals import count_of, counted_losses, further_losses, loss_of
from megascale.train.run import Hook, Run
from megascale.train.step_totals import StepTotals


class FurtherLosses(Hook):
    """Gives exits their weights, and sums all further losses."""

    def batch_read(self, run: Run, batch: StepBatch) -> None:
        weights = exit_weights(run.config.model, run.config.train, run.progress.step + 1)
        for part in batch.micro_batches:
            part.exits.update(weights)

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        parts = [part.further_losses for part in totals.batch.micro_batches if run.mesh.coord.tp == 0]
        for name in further_losses(run.config.model, run.config.train):
            own = [losses[name] for losses in parts if name in losses]
            totals.add(**{loss_of(name): torch.stack(own).sum() if own else 0.0})
        for name in counted_losses(run.config.train):
            counted = [part for part in totals.batch.micro_batches if name in part.further_losses]
            counts = (part.objectives[name].count if name in part.objectives else part.loss_tokens for part in counted)
            totals.add_per_microbatch(**{count_of(name): sum(counts)})


def exit_weights(model: ModelConfig, train: TrainConfig, step: int) -> dict[int, float]:
    """Return the weight of each exit's loss in a step, from 1, by the number of layers before the exit."""
    given, share = train.exit_loss_weight, min(1.0, step / max(1, train.exit_warmup_steps))
    weights = given if isinstance(given, list) else [given] * len(model.exits)
    return {after: share * weight for after, weight in zip(model.exits, weights, strict=True)}


def further_metrics(
    model: ModelConfig, train: TrainConfig, step: int, totals: Mapping[str, float]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return `exits`, `mtp` and `objectives` of `StepMetrics`, from the totals of a step."""
    tokens, deeper = totals["tokens"], range(model.num_layers, model.total_layers)
    weights = exit_weights(model, train, step).items()
    exits = {f"{n}": totals[loss_of(exit_name(n))] / (weight * tokens) for n, weight in weights}
    share = train.mtp_loss_weight / max(1, len(deeper))
    depths = {f"{d}": totals[loss_of(f"layers.{n}")] / (share * tokens) for d, n in enumerate(deeper, 1)}
    means = {"exits": exits, "mtp": depths}
    metrics = {kind: {name: {"loss": mean} for name, mean in own.items()} for kind, own in means.items()}
    sums = {name: (totals[loss_of(name)], totals[count_of(name)]) for name in counted_losses(train)}
    counted = {name: {"loss": loss / count, "count": count} for name, (loss, count) in sums.items() if count}
    return metrics | {"objectives": counted}
