"""Updates of the blend's weights by a data policy (`data.blend_policy`), with its state.

After every `data.blend_policy_every` steps rank 0 asks the policy, with the losses by dataset since its last update,
and all ranks get its answer. The weights begin `data.prefetch` + 2 steps later (`data.mix.data_policy`), whatever reads
the samples, so that a resume goes on exactly, also in another layout. `metrics.jsonl` has every update.
"""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from megascale.config.batch_rampup import batch_sizes
from megascale.config.data import dataset_prefixes
from megascale.core.errors import DataError
from megascale.data.mix.data_policy import DataPolicy, DataReport, next_place, shares
from megascale.data.mix.skipped_ranges import order_index
from megascale.record.metrics import MixtureUpdate
from megascale.train.policy_state import PolicyState
from megascale.train.run import Hook
from megascale.train.step_totals import StepTotals

if TYPE_CHECKING:
    from megascale.train.reporter import Reporter
    from megascale.train.run import Run, StepResult


class PolicyUpdates(Hook):
    """Updates the weights every `data.blend_policy_every` steps. Comes before the saves of a step."""

    def __init__(self, state: PolicyState, reporter: Reporter) -> None:
        self._state = state
        self._reporter = reporter

    def step_begins(self, run: Run) -> None:
        self._state.begin_step(run.progress.samples)

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        self._state.add_totals(totals)

    def step_ends(self, run: Run, result: StepResult) -> None:
        self._state.end_step(result.totals)
        place = order_index(run.progress.samples, run.config.data.skip_samples)
        if run.progress.step % run.config.data.updates_every == 0 and self._state.weights.are_read(place):
            self._update(run)
        self._state.save_state()

    def _update(self, run: Run) -> None:
        """Ask the policy on rank 0, and let its weights begin where no reader can have read yet."""
        state, (losses, tokens) = self._state, self._state.sums
        before = shares(state.weights.newest)
        means = np.divide(losses, tokens, out=np.full_like(losses, math.nan), where=tokens > 0)
        answer: Any = None
        if run.mesh.rank == 0:
            report = DataReport(run.progress.step, np.array(before), means, tokens.copy())
            answer = _asked(str(run.config.data.blend_policy), state.policy, report)
        found, own, problem = run.mesh.world.control.broadcast(answer, "the data policy's weights")
        if problem:
            raise DataError(problem, hint="correct the policy, or data.blend_policy = fixed")
        after, place = tuple(found), None
        if after != before:
            data = run.config.data
            place = next_place(batch_sizes(run.config.batch), data.prefetch, data.skip_samples, run.progress.samples)
            state.weights = state.weights.changed(place, after)
            state.apply_weights()
        state.policy.state[:] = own
        state.sums[:] = 0
        numbers = {}
        for number, prefix in enumerate(dataset_prefixes(run.config.data.train)):
            loss = {"loss": float(means[number])} if math.isfinite(means[number]) else {}
            numbers[f"{number} {PurePosixPath(prefix).name}"] = {"weight": after[number], **loss}
        self._reporter.write(MixtureUpdate(run.progress.step, place, numbers))


def _asked(name: str, policy: DataPolicy, report: DataReport) -> tuple[list[float], list[float], str]:
    """The shares and the state of a policy after an update, and what is wrong with its weights, if anything is."""
    found = np.asarray(policy.update(report), dtype=np.float64)
    if found.shape != report.weights.shape or not (np.isfinite(found).all() and (found >= 0).all() and found.any()):
        what = f"the data policy {name} has found {found.tolist()} after step {report.step}"
        return [], [], f"{what}: not {len(report.weights)} weights of 0 or above, and some above 0"
    return list(shares(found.tolist())), policy.state.tolist(), ""
