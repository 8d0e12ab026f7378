"""Hooks: what acts at named moments of a run, such as metrics, evaluations and saves.

    run_begins
      step_begins  add_totals  step_ends                     for every step
        evaluation_ends, save_starts, save_ends                 as they happen
    run_ends or run_fails

All ranks have the same hooks in the same order, so a hook may communicate. Hooks of a plug-in, in `Run.hooks` before
training, come last.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale.checkpoint.save.attempt import SaveResult
    from megascale.trace.metrics import EvaluationMetrics
    from megascale.train.build import Run
    from megascale.train.step import StepResult
    from megascale.train.step_totals import StepTotals


class Hook:
    """The base class of hooks: does nothing at any moment. An error of a hook ends the run."""

    def run_begins(self, run: Run) -> None:
        """Act before the first step of this process."""

    def step_begins(self, run: Run) -> None:
        """Act before the batch of a step is read."""

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        """Add named totals of this step, after its backwards; `StepResult.totals` has the sums over all ranks."""

    def step_ends(self, run: Run, result: StepResult) -> None:
        """Act after a step; `run.progress` counts it."""

    def evaluation_ends(self, run: Run, metrics: EvaluationMetrics) -> None:
        """Act after an evaluation."""

    def save_starts(self, run: Run, step: int) -> None:
        """Act after the start of a save to storage."""

    def save_ends(self, run: Run, saved: SaveResult) -> None:
        """Act after a save or a copy in memory is complete, or has failed."""

    def run_ends(self, run: Run) -> None:
        """Act after the last step of this process, or a stop request."""

    def run_fails(self, run: Run, error: BaseException) -> None:
        """Act on an error in training, which this process ends with."""


class Hooks(Hook):
    """Several hooks as one, called in turn."""

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self._hooks = list(hooks)

    def add(self, *hooks: Hook) -> None:
        """Add hooks at the end."""
        self._hooks += hooks

    def run_begins(self, run: Run) -> None:
        for hook in self._hooks:
            hook.run_begins(run)

    def step_begins(self, run: Run) -> None:
        for hook in self._hooks:
            hook.step_begins(run)

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        for hook in self._hooks:
            hook.add_totals(run, totals)

    def step_ends(self, run: Run, result: StepResult) -> None:
        for hook in self._hooks:
            hook.step_ends(run, result)

    def evaluation_ends(self, run: Run, metrics: EvaluationMetrics) -> None:
        for hook in self._hooks:
            hook.evaluation_ends(run, metrics)

    def save_starts(self, run: Run, step: int) -> None:
        for hook in self._hooks:
            hook.save_starts(run, step)

    def save_ends(self, run: Run, saved: SaveResult) -> None:
        for hook in self._hooks:
            hook.save_ends(run, saved)

    def run_ends(self, run: Run) -> None:
        for hook in self._hooks:
            hook.run_ends(run)

    def run_fails(self, run: Run, error: BaseException) -> None:
        for hook in reversed(self._hooks):
            hook.run_fails(run, error)
