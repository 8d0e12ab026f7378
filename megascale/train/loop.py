"""Steps, records, evaluations, checkpoints and the request to stop; nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megascale.checkpoint.saving import Saved
from megascale.core.errors import CheckpointError, DivergenceError, Exit, UncountedError
from megascale.train.build import Run
from megascale.train.evaluate import evaluate
from megascale.train.gc import ScheduledCollection
from megascale.train.guard import check_state
from megascale.train.report import Reporter
from megascale.train.step import logged, train_step

NOTED = 0.005
"""Seconds of waiting that are told."""


def train(run: Run, reporter: Reporter) -> Exit:
    """Train until the last step, or until some rank is asked to stop. Returns how it ended."""
    settings, steps = run.config.train, run.config.train.steps
    stopping, first = False, run.progress.step + 1
    run.train.prepare(run.progress.samples)
    run.mesh.world.control.barrier("the first step")  # rank 0 has written the indices that the first step reads
    if run.valid is not None and run.progress.step == 0:
        reporter.write(evaluate(run))
    with ScheduledCollection() as collection, _completing(run, reporter):
        while run.progress.step < steps and not stopping:
            reporter.start_step()
            result = train_step(run, run.train.batch(run.progress.samples))
            reporter.end_step(result)
            step, stopping = run.progress.step, result.stop
            if step == first:
                run.mesh.timeout.tighten()
            if logged(settings, step):
                reporter.step(result, run.progress, run.scaling.take_lost())
            if run.valid is not None and (step % settings.eval_every == 0 or step == steps):
                reporter.write(evaluate(run))
            _note(run, reporter, run.checkpoints.settle(result.written, result.failed))
            if step < steps:
                _begin_save(run, reporter)
            collection.after(step)
    run.gradients.finish_gather()
    run.pipeline.finish_sends()
    if run.config.checkpoint.every:
        conclude(run, reporter)
    if stopping and run.progress.step < steps:
        reporter.note(f"stopped by a signal after step {run.progress.step}")
        return Exit.STOPPED
    return Exit.OK


@contextmanager
def _completing(run: Run, reporter: Reporter) -> Iterator[None]:
    """Complete the checkpoint under way, which is of a step before, when training ends in what every rank raises."""
    try:
        yield
    except (DivergenceError, UncountedError):
        _note(run, reporter, run.checkpoints.finish())
        raise


def _begin_save(run: Run, reporter: Reporter) -> None:
    """Begin to save a state that is finite, if this step's is to be. What fails must not end the run that it should
    protect.

    Raises: DivergenceError if it is not finite
    """
    wanted = run.config.checkpoint
    if not (wanted.every and run.progress.step % wanted.every == 0):
        if wanted.memory_every and run.progress.step % wanted.memory_every == 0:
            check_state(run)
            run.checkpoints.remember(run.progress)
        return
    check_state(run)
    _note(run, reporter, run.checkpoints.finish())
    try:
        run.checkpoints.begin(run.progress)
    except CheckpointError as error:
        reporter.note(f"WARNING: no checkpoint of step {run.progress.step}: {error}")
        return
    if not run.config.checkpoint.background:
        _note(run, reporter, run.checkpoints.finish())


def conclude(run: Run, reporter: Reporter) -> None:
    """Save a state that is finite, unless it is on storage, and wait for it; then nothing stays in memory.

    Raises: CheckpointError if it could not be written, DivergenceError if it is not finite.
    """
    _note(run, reporter, run.checkpoints.finish())
    check_state(run)
    _note(run, reporter, run.checkpoints.save(run.progress))
    _warn(reporter, run.checkpoints.removed)
    run.checkpoints.forget()


def _note(run: Run, reporter: Reporter, saved: Saved | None) -> None:
    """Say what became of a checkpoint, and when it is complete remove old ones."""
    if saved is None:
        return
    if saved.error is not None:
        what = "checkpoint" if saved.path else "copy in memory"
        reporter.note(f"WARNING: no {what} of step {saved.step}: {saved.error}")
        return
    if saved.path is None:
        return
    before = f" after {saved.waited:.2f} s for the one before" if saved.waited > NOTED else ""
    reporter.note(
        f"saved {saved.path}: training stood for {saved.stalled:.2f} s{before}, written in {saved.written:.2f} s"
    )
    _warn(reporter, run.checkpoints.remove_old)


def _warn(reporter: Reporter, action: Callable[[], None]) -> None:
    """Do something that must not end the run if it fails."""
    try:
        action()
    except CheckpointError as error:
        reporter.note(f"WARNING: {error}")
