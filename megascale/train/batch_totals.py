"""Totals over the batch of a step: its samples with a batch ramp-up, with a document mask the scores of attention, from
which FLOPs follow, and those of the gradient noise scale; before its forwards the labels, by which losses are divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from megascale.config.model import ModelConfig
from megascale.layout.parts.part import Scores
from megascale.parallel.microbatch import StepBatch
from megascale.plan.account.attended import count_scores_in
from megascale.plan.account.step_totals import COUNTED_TERMS, counted_weights, score_totals, vector_name
from megascale.train.run import Hook, Run, StepResult
from megascale.train.step_totals import StepTotals

if TYPE_CHECKING:
    from megascale.config.data import DataConfig
    from megascale.config.train import BatchConfig, TrainConfig
    from megascale.parallel.experts.router_losses import RouterLosses
    from megascale.train.noise_scale import NoiseScale


def batch_totals(
    model: ModelConfig, batch: BatchConfig, data: DataConfig, train: TrainConfig, noise_scale: NoiseScale | None,
    losses: RouterLosses | None,
) -> list[Hook]:  # fmt: skip
    """Return the hooks of the totals that a run has."""
    return [
        *([SampleCount()] if batch.rampup is not None else []),
        *([DocumentScores()] if data.attention_mask == "document" else []),
        *([LabelCounts(losses)] if losses is not None or counted_weights(model, train) else []),
        *([NoiseMeasurement(noise_scale)] if noise_scale is not None else []),
    ]


class SampleCount(Hook):
    """Counts the samples of a step."""

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        totals.add_per_sequence(samples=len(totals.batch.sequences) * run.config.batch.micro)


class DocumentScores(Hook):
    """Counts the scores per head that this rank's documents have, in both conventions, by window."""

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        parts = totals.batch.sequences
        lengths = [length for part in parts if part.boundaries for length in part.boundaries.real_lengths]
        for window, names in score_totals(run.config.model).items():
            totals.add_per_microbatch(**dict(zip(names, count_scores_in(lengths, window), strict=True)))


class LabelCounts(Hook):
    """Counts labels and tokens of a step for the routers' `losses`, and the terms of depths of multi-token prediction
    and of objectives.

    Such a loss is its weight, of depth d of D weight / D, times the mean over its n terms of the step: a sum times the
    constant weight x N / n, as clipping divides by the N labels of the step.
    """

    def __init__(self, losses: RouterLosses | None) -> None:
        self._losses = losses

    def batch_read(self, run: Run, batch: StepBatch) -> None:
        """Give the terms their constants, 0 without any in the step."""
        totals = StepTotals(run.mesh, run.device.torch_device, batch)
        weights = counted_weights(run.config.model, run.config.train)
        parts = [terms for part in batch.micro_batches if (terms := part.counted_terms)]  # none before the last stage
        by_loss = [[terms[loss] for terms in parts] for loss in range(len(weights))]
        counts = {vector_name(COUNTED_TERMS, loss): sum(t.count for t in own) for loss, own in enumerate(by_loss)}
        whole = run.config.batch.micro * run.config.model.seq_length
        totals.add_per_microbatch(tokens=batch.loss_tokens, routed=count_tokens(batch, whole), **counts)
        sums = totals.reduce("labels of the step")
        if self._losses is not None:
            self._losses.loss_tokens, self._losses.routed = sums["tokens"], sums["routed"]
            self._losses.samples = run.config.step_samples.at(run.progress.samples) // run.config.sites.count
        for weight, own, name in zip(weights, by_loss, counts, strict=True):
            constant = torch.where(sums[name] > 0, weight * sums["tokens"] / sums[name], 0.0) if weight else None
            for each in own:
                each.constant = constant


def count_tokens(batch: StepBatch, whole: int) -> int:
    """Count the tokens of the sequences of a batch, without padding; 0 on ranks without the first part of sequences.
    `whole`: of the sequences of a micro-batch, with padding.
    """
    return sum(whole if part.boundaries is None else sum(part.boundaries.filled) for part in batch.sequences)


class NoiseMeasurement(Hook):
    """Measures the gradient noise scale."""

    def __init__(self, noise_scale: NoiseScale) -> None:
        self._noise_scale = noise_scale

    def step_begins(self, run: Run) -> None:
        self._noise_scale.begin_step(run.progress.step + 1)

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        self._noise_scale.add_totals(totals)

    def step_ends(self, run: Run, result: StepResult) -> None:
        self._noise_scale.end_step(result.totals, result.grad_norm)


def take_scores(model: ModelConfig, totals: Mapping[str, float]) -> Scores | None:
    """The scores in the totals of a step; None without a document mask, where every step has the same."""
    names = score_totals(model)
    if any(name not in totals for pair in names.values() for name in pair):
        return None
    return {window: (totals[full], totals[causal]) for window, (full, causal) in names.items()}


def per_token(steps: list[Scores], tokens: float) -> Scores:
    """The mean scores per token of steps with `tokens` tokens together."""
    sums = {
        window: [sum(values) for values in zip(*(step[window] for step in steps), strict=True)] for window in steps[0]
    }
    return {window: (full / tokens, causal / tokens) for window, (full, causal) in sums.items()}
