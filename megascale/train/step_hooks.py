"""Hooks of features that are part of a step: each adds totals over the batch, or state that follows from them."""

from __future__ import annotations

from megascale.config.run import RunConfig
from megascale.train.noise_scale import NoiseScale
from megascale.train.run import Hook, Hooks, Run, StepResult
from megascale.train.score_totals import add_scores
from megascale.train.step_totals import StepTotals


def build_step_hooks(config: RunConfig, noise_scale: NoiseScale | None) -> Hooks:
    """Return the hooks of the features that a configuration has."""
    return Hooks([
        *([SampleCount()] if config.batch.rampup is not None else []),
        *([DocumentScores()] if config.data.mask == "document" else []),
        *([NoiseMeasurement(noise_scale)] if noise_scale is not None else []),
    ])  # fmt: skip


class SampleCount(Hook):
    """Counts the samples of a step, which a batch ramp-up changes."""

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        totals.add_per_sequence(samples=len(totals.batch.sequences) * run.config.batch.micro)


class DocumentScores(Hook):
    """Counts the scores of attention within documents, from which FLOPs follow."""

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        add_scores(totals, run.config.model)


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
