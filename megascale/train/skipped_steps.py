"""Says and counts the steps that were not applied because of a spike (`optimizer.skip_sigma`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megascale.train.hooks import Hook

if TYPE_CHECKING:
    from megascale.train.build import Run
    from megascale.train.reporter import Reporter
    from megascale.train.step import StepResult


class SkippedSteps(Hook):
    """Writes a message for every skipped step, and counts them in the flight record."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def run_begins(self, run: Run) -> None:
        if run.config.optimizer.skip_sigma:
            run.mesh.recorder.flight.count("skipped_steps", 0)

    def step_ends(self, run: Run, result: StepResult) -> None:
        if result.totals.get("skipped"):
            run.mesh.recorder.flight.count("skipped_steps")
            self._reporter.write_message(
                f"WARNING: step {run.progress.step} was not applied: loss {result.loss:.4g} or gradient norm "
                f"{result.grad_norm:.4g} is over {run.config.optimizer.skip_sigma:g} standard deviations above recent "
                "steps"
            )
