"""Saves during training: to storage and to memory when due, completed and reported, and the last one at the end."""

from __future__ import annotations

import time
from collections.abc import Callable

from megascale.checkpoint.save.saver import SaveResult
from megascale.core.errors import CheckpointError, DivergenceError, NoLossTokensError, ReplicasDifferError
from megascale.record.layout import Phase
from megascale.train.finite_check import check_state_finite
from megascale.train.reporter import Reporter
from megascale.train.run import Hook, Run, StepResult

MIN_REPORTED_WAIT_S = 0.005  # shortest wait for the previous save that is reported, in seconds


class Saves(Hook):
    """Saves as `[checkpoint]` asks for. A failed save is a warning, except for the last one of a run."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def run_begins(self, run: Run) -> None:
        if run.config.checkpoint.every:  # the metric also says that this run saves
            run.mesh.recorder.log.count("checkpoint_failures", 0)

    def step_ends(self, run: Run, result: StepResult) -> None:
        with run.mesh.recorder.activity(Phase.CHECKPOINT):
            self._report(
                run, run.checkpoints.complete_save(result.totals["ranks_written"], result.totals["ranks_failed"])
            )
            if run.progress.step < run.config.train.steps:
                self._start_if_due(run)

    def run_ends(self, run: Run) -> None:
        if run.config.checkpoint.every:
            self.save_final(run)

    def run_fails(self, run: Run, error: BaseException) -> None:
        """Complete the save of an earlier step, still in progress, on an error of every rank."""
        if isinstance(error, (DivergenceError, NoLossTokensError, ReplicasDifferError)):
            self._report(run, run.checkpoints.wait_for_save())

    def save_final(self, run: Run) -> None:
        """Save the final state, unless it is on storage already; wait for the save, and drop copies in memory.

        Raises: CheckpointError if the save fails, DivergenceError if the state is not finite.
        """
        run.mesh.recorder.log.set_phase(Phase.CHECKPOINT)
        self._report(run, run.checkpoints.wait_for_save())
        check_state_finite(run)
        run.hooks.save_starts(run, run.progress.step)
        self._report(run, run.checkpoints.save(run.progress))
        self._warn_on_failure(run.checkpoints.wait_for_prune)
        run.checkpoints.drop_memory_copies()

    def _start_if_due(self, run: Run) -> None:
        """Start a save to storage or to memory if one is due after this step. Save errors become warnings.

        Raises: DivergenceError if the state is not finite.
        """
        settings, step = run.config.checkpoint, run.progress.step
        if not (settings.every and step % settings.every == 0):
            if settings.in_memory_every and step % settings.in_memory_every == 0:
                check_state_finite(run)
                run.checkpoints.save_to_memory(run.progress)
            return
        check_state_finite(run)
        self._report(run, run.checkpoints.wait_for_save())
        try:
            run.checkpoints.start_save(run.progress)
        except CheckpointError as error:
            self._warn_of_failed_save(run, step, error)
            return
        run.hooks.save_starts(run, step)
        if not settings.background:
            self._report(run, run.checkpoints.wait_for_save())

    def _report(self, run: Run, saved: SaveResult | None) -> None:
        """Report a save, and prune old checkpoints after a complete save."""
        if saved is None:
            return
        run.hooks.save_ends(run, saved)
        if saved.path is None:
            self.report_copy(saved)
            return
        if saved.error is not None:
            self._warn_of_failed_save(run, saved.step, saved.error)
            return
        run.mesh.recorder.log.set_total("checkpoint_step", saved.step)
        run.mesh.recorder.log.set_total("checkpoint_time", time.time())
        waited = (
            f" after waiting {saved.waited_s:.2f} s for the previous save"
            if saved.waited_s > MIN_REPORTED_WAIT_S
            else ""
        )
        self._reporter.write_message(
            f"saved {saved.path}: training paused {saved.stalled_s:.2f} s{waited}, written in {saved.write_s:.2f} s"
        )
        self._warn_on_failure(run.checkpoints.prune)

    def _warn_of_failed_save(self, run: Run, step: int, error: CheckpointError) -> None:
        run.mesh.recorder.log.count("checkpoint_failures")
        self._reporter.write_message(f"WARNING: no checkpoint of step {step}: {error}")

    def report_copy(self, saved: SaveResult) -> None:
        """Report the first of several failed copies in memory, and the next that succeeds: one may be due each step."""
        part, reporter = "copies in memory", self._reporter
        if saved.error is not None:
            if reporter.outages.begins(part):
                text = f"WARNING: no copy in memory of step {saved.step}: {saved.error}; tried again at every copy"
                reporter.write_message(text)
        elif missed := reporter.outages.ends(part):
            failed = f"{missed} attempt{'s' * (missed > 1)} failed"
            reporter.write_message(f"copies in memory are made again from step {saved.step} on; {failed} before")

    def _warn_on_failure(self, action: Callable[[], None]) -> None:
        """Run `action`; turn a CheckpointError into a warning, the first time that it has this text."""
        try:
            action()
        except CheckpointError as error:
            if self._reporter.outages.begins(str(error)):
                self._reporter.write_message(f"WARNING: {error}")
