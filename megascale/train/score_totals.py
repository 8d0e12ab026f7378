"""The scores of attention in a step with a document mask: totals over all ranks, from which FLOPs follow."""

from __future__ import annotations

from collections.abc import Mapping

from megascale.config.model import ModelConfig
from megascale.layout.parts.part import Scores
from megascale.plan.account.attended import count_scores_in
from megascale.plan.account.step_totals import score_totals
from megascale.train.step_totals import StepTotals


def add_scores(totals: StepTotals, model: ModelConfig) -> None:
    """Add the scores per head that this rank's documents have, in both conventions, by window."""
    lengths = [length for part in totals.batch.sequences if part.boundaries for length in part.boundaries.real_lengths]
    for window, names in score_totals(model).items():
        totals.add_per_microbatch(**dict(zip(names, count_scores_in(lengths, window), strict=True)))


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
