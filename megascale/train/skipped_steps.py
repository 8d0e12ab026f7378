"""Says and counts the steps that were not applied: a spike (`optimizer.skip_sigma`), or a batch without labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megascale.core.errors import NoLossTokensError
from megascale.train.run import Hook

if TYPE_CHECKING:
    from megascale.train.reporter import Reporter
    from megascale.train.run import Run, StepResult

MOST_WITHOUT_LABELS = 16  # steps of a run after which it ends if no batch has had a label


class SkippedSteps(Hook):
    """Writes a message for every skipped step, and counts them in the flight record."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def run_begins(self, run: Run) -> None:
        if run.config.optimizer.skip_sigma:
            run.mesh.recorder.log.count("skipped_steps", 0)

    def step_ends(self, run: Run, result: StepResult) -> None:
        """Raises: NoLossTokensError on every rank, if no step of the run so far has had a label"""
        if result.totals.get("skipped"):
            run.mesh.recorder.log.count("skipped_steps")
            reason = (
                f"loss {result.loss:.4g} or gradient norm {result.grad_norm:.4g} is over "
                f"{run.config.optimizer.skip_sigma:g} standard deviations above recent steps"
                if result.loss_tokens
                else _no_label(run, result)
            )
            self._reporter.write_message(f"WARNING: step {run.progress.step} was not applied: {reason}")
        if not run.progress.tokens and run.progress.step >= MOST_WITHOUT_LABELS:
            what = f"no label of the first {run.progress.step} steps counts in the loss"
            raise NoLossTokensError(what, hint="check the data with `megascale data inspect`, and data.sample_weight")


def _no_label(run: Run, result: StepResult) -> str:
    from megascale.data.mix.skipped_ranges import order_index, read_before

    end, skip = run.progress.samples, run.config.data.skip_samples
    size = int(result.totals.get("samples", run.config.batch.total))  # fewer in a batch ramp-up
    first, stop = order_index(end - size, skip), read_before(end, skip)
    what = f"no label of its samples {first} to {stop - 1} counts in the loss"
    return f"{what}; data.skip_samples = [[{first}, {stop}]] leaves them out of another run"
