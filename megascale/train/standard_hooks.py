"""The hooks of every run, and the small ones among them."""

from __future__ import annotations

from megascale.plan.account.step_totals import counted_losses, expert_metrics
from megascale.train.further_losses import further_metrics
from megascale.train.reporter import Reporter
from megascale.train.run import Hook, Hooks, Run, StepResult
from megascale.train.saves import Saves
from megascale.train.scheduled_gc import ScheduledGC
from megascale.train.skipped_steps import SkippedSteps
from megascale.train.spike import SpikeAlert
from megascale.train.start_report import StartReport
from megascale.train.step import is_logged_step


def standard_hooks(run: Run, reporter: Reporter) -> Hooks:
    """Return the hooks of every run, then those of plug-ins. Replicas are checked before a save of the step."""
    hooks: list[Hook] = [StartReport(reporter)]
    if run.config.observe.profile_step or not run.progress.step:  # a run that begins removes an earlier one's profiles
        from megascale.train.kernel_shares import KernelShares

        hooks.append(KernelShares())
    if run.config.train.check_replicas_every:
        from megascale.train.replica_check import ReplicaCheck

        hooks.append(ReplicaCheck())
    if run.policy is not None:
        from megascale.train.policy_updates import PolicyUpdates

        hooks.append(PolicyUpdates(run.policy, reporter))
    hooks += [StepRecords(reporter), SpikeAlert(run.config.fault, reporter), SkippedSteps(reporter)]
    if run.config.train.quantizes and run.config.fp8.schedule:
        from megascale.train.fp8_casts import RecipeChanges

        hooks.append(RecipeChanges(reporter.write_message, run.config.fp8.recipe))
    if run.sites is not None:
        from megascale.train.outer_steps import Sites

        assert isinstance(run.sites, Sites), "sites meet in outer steps"
        run.sites.say = reporter.write_message
        hooks.append(run.sites)
    if run.average is not None:
        hooks.append(WeightAveraging())
    if run.valid_loader is not None:
        from megascale.train.evaluate import Evaluations

        hooks.append(Evaluations(reporter))
    if run.config.train.logit_sharpness_every:
        from megascale.train.logit_sharpness import LogitSharpness

        hooks.append(LogitSharpness(reporter))
    hooks += [Saves(reporter), ScheduledGC()]
    if not run.mesh.rank:
        from megascale.train.plan_record import PlanRecord

        hooks.append(PlanRecord())
    return Hooks([*hooks, run.hooks])


class StepRecords(Hook):
    """Writes the metrics of logged steps; a step without a label has no loss, and no record."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def step_begins(self, run: Run) -> None:
        if run.optimizer.kept is not None:
            run.optimizer.kept.on = is_logged_step(run.config.train, run.progress.step + 1)

    def step_ends(self, run: Run, result: StepResult) -> None:
        if is_logged_step(run.config.train, run.progress.step) and result.loss_tokens:
            noise_scale = run.noise_scale.value if run.noise_scale else None
            cast_stats = run.fp8_state.take_cast_stats() if run.fp8_state else {}
            model, train, totals = run.config.model, run.config.train, result.totals
            features = further_metrics(model, train, run.progress.step, totals)
            absent = [name for name in counted_losses(train) if name not in features["objectives"]]
            for name in absent if run.progress.step == 1 else ():
                self._reporter.write_message(f"WARNING: {name} has no term in step 1: has the data what it compares?")
            if model.experts:
                features["experts"] = expert_metrics(model, run.config.moe, totals)
            kept = run.optimizer.kept.take(run.mesh, run.device.torch_device) if run.optimizer.kept else None
            self._reporter.write_step(result, run.progress, cast_stats, noise_scale, kept, **features)


class WeightAveraging(Hook):
    """Updates the average of the weights after a step."""

    def step_ends(self, run: Run, result: StepResult) -> None:
        assert run.average is not None, "a run with this hook has an average"
        run.average.update(run.progress.step)
