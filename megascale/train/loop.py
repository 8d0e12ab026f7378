"""The training loop: steps, metrics, evaluations, checkpoints, and stop requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megascale.checkpoint.save.attempt import SaveResult
from megascale.core.errors import CheckpointError, DivergenceError, Exit, NoLossTokensError, ReplicasDifferError
from megascale.core.flight_layout import Phase
from megascale.train.build import Run
from megascale.train.evaluate import evaluate
from megascale.train.finite_check import check_state_finite
from megascale.train.replica_check import ReplicaCheck
from megascale.train.reporter import Reporter
from megascale.train.scheduled_gc import ScheduledGC
from megascale.train.step import is_logged_step, train_step

MIN_REPORTED_WAIT_S = 0.005
"""Shortest wait for the previous save that is reported, in seconds."""


def train(run: Run, reporter: Reporter) -> Exit:
    """Train until the last step or a stop request on any rank. Returns the exit status."""
    flight = run.mesh.recorder.flight
    flight.set_phase(Phase.DATA)
    run.train_loader.prepare_indices(run.progress.samples)
    run.mesh.world.control.barrier("the first step")  # the first step reads indices that rank 0 writes
    if run.valid_loader is not None and run.progress.step == 0:
        with flight.phase(Phase.EVALUATION):
            reporter.write(evaluate(run))
    flight.set_phase(Phase.STEP)
    with run.stop.deferred():
        return _train_and_save(run, reporter)


def _train_and_save(run: Run, reporter: Reporter) -> Exit:
    settings, steps = run.config.train, run.config.train.steps
    stopping, first_step = False, run.progress.step + 1
    replicas, flight = ReplicaCheck(), run.mesh.recorder.flight
    with ScheduledGC() as collection, _finish_save_on_error(run, reporter):
        while run.progress.step < steps and not stopping:
            reporter.start_step()
            with flight.phase(Phase.DATA):
                batch = run.train_loader.batch(run.progress.samples)
            result = train_step(run, batch)
            reporter.end_step(result)
            step, stopping = run.progress.step, result.stop
            if step == first_step:
                run.mesh.timeout.tighten()
            if settings.check_replicas and step % settings.check_replicas == 0:  # before a save of this step
                replicas.check(run)
            if is_logged_step(settings, step):
                reporter.write_step(result, run.progress, run.fp8_state.take_cast_stats())
            if run.valid_loader is not None and (step % settings.eval_every == 0 or step == steps):
                with flight.phase(Phase.EVALUATION):
                    reporter.write(evaluate(run))
            with flight.phase(Phase.CHECKPOINT):
                _report_save(run, reporter, run.checkpoints.complete_save(result.ranks_written, result.ranks_failed))
                if step < steps:
                    _start_save(run, reporter)
            with flight.phase(Phase.GC):
                collection.collect_if_due(step)
    run.buffers.finish_param_gather()
    run.pipeline.finish_sends()
    if run.config.checkpoint.every:
        save_final(run, reporter)
    if stopping and run.progress.step < steps:
        unsaved = "" if run.config.checkpoint.every else "; nothing was saved: checkpoint.every = 0"
        reporter.write_message(f"stopped by a signal after step {run.progress.step}{unsaved}")
        return Exit.STOPPED
    return Exit.OK


@contextmanager
def _finish_save_on_error(run: Run, reporter: Reporter) -> Iterator[None]:
    """Complete the save of an earlier step, still in progress, when an error that every rank raises ends training."""
    try:
        yield
    except (DivergenceError, NoLossTokensError, ReplicasDifferError):
        _report_save(run, reporter, run.checkpoints.wait_for_save())
        raise


def _start_save(run: Run, reporter: Reporter) -> None:
    """Start a save to storage or to memory if one is due after this step. Save errors become warnings.

    Raises: DivergenceError if the state is not finite.
    """
    settings = run.config.checkpoint
    if not (settings.every and run.progress.step % settings.every == 0):
        if settings.memory_every and run.progress.step % settings.memory_every == 0:
            check_state_finite(run)
            run.checkpoints.save_to_memory(run.progress)
        return
    check_state_finite(run)
    _report_save(run, reporter, run.checkpoints.wait_for_save())
    try:
        run.checkpoints.start_save(run.progress)
    except CheckpointError as error:
        reporter.write_message(f"WARNING: no checkpoint of step {run.progress.step}: {error}")
        return
    if not run.config.checkpoint.background:
        _report_save(run, reporter, run.checkpoints.wait_for_save())


def save_final(run: Run, reporter: Reporter) -> None:
    """Save the final state, unless it is on storage already; wait for the save, and drop copies in memory.

    Raises: CheckpointError if the save fails, DivergenceError if the state is not finite.
    """
    run.mesh.recorder.flight.set_phase(Phase.CHECKPOINT)
    _report_save(run, reporter, run.checkpoints.wait_for_save())
    check_state_finite(run)
    _report_save(run, reporter, run.checkpoints.save(run.progress))
    _warn_on_failure(reporter, run.checkpoints.wait_for_prune)
    run.checkpoints.drop_memory_copies()


def _report_save(run: Run, reporter: Reporter, saved: SaveResult | None) -> None:
    """Report a save, and prune old checkpoints after a complete save."""
    if saved is None:
        return
    if saved.path is None:
        _report_copy(reporter, saved)
        return
    if saved.error is not None:
        reporter.write_message(f"WARNING: no checkpoint of step {saved.step}: {saved.error}")
        return
    waited = (
        f" after waiting {saved.waited_s:.2f} s for the previous save" if saved.waited_s > MIN_REPORTED_WAIT_S else ""
    )
    reporter.write_message(
        f"saved {saved.path}: training paused {saved.stalled_s:.2f} s{waited}, written in {saved.write_s:.2f} s"
    )
    _warn_on_failure(reporter, run.checkpoints.prune)


def _report_copy(reporter: Reporter, saved: SaveResult) -> None:
    """Report the first of several failed copies in memory, and the first copy after them: they may be due each step."""
    part = "copies in memory"
    if saved.error is not None:
        if reporter.outages.begins(part):
            text = f"WARNING: no copy in memory of step {saved.step}: {saved.error}; tried again at every copy"
            reporter.write_message(text)
    elif missed := reporter.outages.ends(part):
        reporter.write_message(f"copies in memory are made again from step {saved.step} on; {missed} are missing")


def _warn_on_failure(reporter: Reporter, action: Callable[[], None]) -> None:
    """Run `action`; turn a CheckpointError into a warning, the first time that it has this text."""
    try:
        action()
    except CheckpointError as error:
        if reporter.outages.begins(str(error)):
            reporter.write_message(f"WARNING: {error}")
