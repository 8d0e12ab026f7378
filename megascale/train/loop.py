"""The training loop: steps, with hooks at the moments between them (`train.run`)."""

from __future__ import annotations

from megascale.core.errors import Exit
from megascale.record.layout import Phase
from megascale.record.rank_state import UNORDERED_SIGNAL
from megascale.train.reporter import Reporter
from megascale.train.run import Run
from megascale.train.standard_hooks import standard_hooks
from megascale.train.step import train_step
from megascale.train.step_rows import StepRows


def train(run: Run, reporter: Reporter) -> Exit:
    """Train until the last step or a stop request on any rank. Returns the exit status."""
    log = run.mesh.recorder.log
    run.hooks = standard_hooks(run, reporter)
    steps = run.config.train.steps - run.progress.step
    run.train_loader.begin(run.progress.samples, run.config.step_samples.after_steps(run.progress.samples, steps))
    if run.valid_loader is not None:
        run.valid_loader.begin(0)
    try:
        run.hooks.run_begins(run)
        log.set_phase(Phase.STEP)
        with run.stop.deferred(), StepRows(run) as rows:
            stopped, first_step = False, run.progress.step + 1
            while run.progress.step < run.config.train.steps and not stopped:
                rows.begin(run.progress.step + 1)
                run.hooks.step_begins(run)
                reporter.start_step()
                with run.mesh.recorder.activity(Phase.DATA):
                    batch = run.train_loader.batch(run.progress.samples)
                result = train_step(run, batch)
                reporter.end_step(result)
                rows.end(result)
                if run.progress.step == first_step:
                    run.mesh.timeout.tighten()
                run.hooks.step_ends(run, result)
                stopped = result.stop
            run.buffers.finish_param_gather()
            run.pipeline.finish_sends()
            run.hooks.run_ends(run)
    except BaseException as error:
        run.hooks.run_fails(run, error)
        raise
    finally:
        run.train_loader.close()
    if not stopped or run.progress.step == run.config.train.steps:
        return Exit.OK
    if run.stop.unordered:
        log.set_total(UNORDERED_SIGNAL, run.stop.unordered)
    saved = ", which is saved" if run.config.checkpoint.every else "; nothing was saved: checkpoint.every = 0"
    reporter.write_message(f"stopped by a signal after step {run.progress.step}{saved}")
    return Exit.STOPPED
