"""Steps, records, evaluations, checkpoints and the request to stop; nothing else."""

from __future__ import annotations

from megascale.core.errors import CheckpointError, Exit
from megascale.core.units import format_count
from megascale.train.build import Run
from megascale.train.evaluate import evaluate
from megascale.train.gc import ScheduledCollection
from megascale.train.report import Reporter
from megascale.train.step import train_step


def train(run: Run, reporter: Reporter) -> Exit:
    """Train until the last step, or until some rank is asked to stop. Returns how it ended."""
    settings, steps = run.config.train, run.config.train.steps
    stopping = False
    if run.valid is not None and run.progress.step == 0:
        reporter.write(evaluate(run))
    with ScheduledCollection() as collection:
        while run.progress.step < steps and not stopping:
            reporter.start_step()
            result = train_step(run, run.train.batch(run.progress.samples))
            reporter.end_step(result)
            step, stopping = run.progress.step, result.stop
            if step % settings.log_every == 0 or step in (1, steps):
                reporter.step(result, run.progress)
            if run.valid is not None and (step % settings.eval_every == 0 or step == steps):
                reporter.write(evaluate(run))
            if run.config.checkpoint.every and step % run.config.checkpoint.every == 0 and step < steps:
                _save_and_go_on(run, reporter)
            collection.after(step)
    run.gradients.finish_gather()
    if run.config.checkpoint.every:
        path = run.checkpoints.save(run.progress)
        if path is not None:
            reporter.note(f"saved {path}")
    if stopping and run.progress.step < steps:
        reporter.note(f"stopped by a signal after step {run.progress.step}")
        return Exit.STOPPED
    return Exit.OK


def resume(run: Run) -> str:
    """Take up a checkpoint if the configuration asks for one and there is one. Returns a line that says so, or
    nothing.
    """
    found = run.checkpoints.resume()
    if found is None:
        return ""
    run.progress, path = found
    run.optimizer.publish_masters()
    run.gradients.start_gather()
    return f"resumed from {path}: step {run.progress.step}, {format_count(run.progress.tokens)} tokens"


def _save_and_go_on(run: Run, reporter: Reporter) -> None:
    """A checkpoint that cannot be written must not end the run that it should protect: say so, and try at the next."""
    try:
        reporter.note(f"saved {run.checkpoints.save(run.progress)}")
    except CheckpointError as error:
        reporter.note(f"WARNING: no checkpoint of step {run.progress.step}: {error}")
