"""Totals over the batch of a step: its samples with a batch ramp-up, with a document mask the scores of attention, from
which FLOPs follow, and those of the gradient noise scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megascale.config.data import DataConfig
from megascale.config.model import ModelConfig
from megascale.config.train import BatchConfig
from megascale.layout.parts.part import Scores
from megascale.plan.account.attended import count_scores_in
from megascale.plan.account.step_totals import score_totals
from megascale.train.run import Hook, Run, StepResult
from megascale.train.step_totals import StepTotals

if TYPE_CHECKING:
    from megascale.train.noise_scale import NoiseScale


def batch_totals(batch: BatchConfig, data: DataConfig, noise_scale: NoiseScale | None) -> list[Hook]:
    """Return the hooks of the totals that a run has."""
    return [
        *([SampleCount()] if batch.rampup is not None else []),
        *([DocumentScores()] if data.attention_mask == "document" else []),
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
