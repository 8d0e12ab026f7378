"""Updates of the blend's weights by a data policy (`data.policy`), with its state.

After every `data.policy_every` steps rank 0 asks the policy, with the losses by dataset since its last update, and all
ranks get its answer. The weights begin `data.prefetch` + 2 steps later (`data.mixture_weights`), whatever reads the
samples, so that a resume goes on exactly, also in another layout. `metrics.jsonl` has every update.
"""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megascale.catalog.data_policies import DATA_POLICIES
from megascale.comm.mesh import Mesh
from megascale.config.policy_rules import policy_every
from megascale.config.run import RunConfig, dataset_prefixes
from megascale.core.errors import DataError
from megascale.core.skipped_ranges import order_index
from megascale.data.batch_shape import BatchShape
from megascale.data.data_policy import DataPolicy, DataReport
from megascale.data.loader import Loader
from megascale.data.mixture_weights import MixtureWeights, next_place, numbers, shares
from megascale.parallel.microbatch import MicroBatch
from megascale.parallel.pipeline import PipelineExecutor
from megascale.parallel.replicated_state import ReplicatedState
from megascale.plan.account.step_totals import DATASET_LOSSES, DATASET_TOKENS, vector_name
from megascale.trace.metrics import MixtureUpdate
from megascale.train.hooks import Hook
from megascale.train.step_totals import StepTotals

if TYPE_CHECKING:
    from megascale.train.build import Run
    from megascale.train.reporter import Reporter
    from megascale.train.step import StepResult

MIXTURE = "data_policy.mixture"
"""Name of the saved weights, and of losses and tokens by dataset since the last update."""


class PolicyState(ReplicatedState):
    """The weights of the mixture, losses and tokens [datasets] since the last update, and the policy with its state.

    On the last stage `pipeline` tells the losses of micro-batches, of one sample each, if the policy uses losses.
    """

    def __init__(
        self, config: RunConfig, mesh: Mesh, pipeline: PipelineExecutor, loader: Loader, device: torch.device
    ) -> None:
        card, train = DATA_POLICIES[str(config.data.policy)], config.data.train
        assert isinstance(train, list), "a policy changes the weights of a blend"
        self.weights = MixtureWeights.first([weight for weight, _ in train])
        self.policy: DataPolicy = card.load()(np.array(shares(self.weights.newest)))
        self.uses_losses = bool(card.facts.get("uses_losses"))
        self.sums = np.zeros((2, len(train)))
        self._own = f"data_policy.{card.name}"
        sizes = {MIXTURE: numbers(len(train)) + self.sums.size, self._own: 1 + len(self.policy.state)}
        super().__init__(sizes, mesh, device)
        self._config, self._rank = config, mesh.coord.dp
        self._shape = BatchShape(config.batch.total, config.batch.micro, config.dp)
        self._loader = loader
        self._parts = torch.zeros(self.sums.shape, dtype=torch.float64, device=device)  # of this rank, in this step
        self._first = 0
        if self.uses_losses:
            pipeline.on_loss = self._add_loss
        self._blend = self.weights.blend()

    def apply_weights(self) -> None:
        """Read samples by the present weights from now on."""
        self._blend = self.weights.blend()
        self._loader.change_weights(self.weights)

    def save_state(self) -> None:
        """Keep the weights, the sums and the state of the policy for the next checkpoint."""
        self.store(MIXTURE, [*self.weights.to_numbers(), *self.sums.ravel().tolist()])
        self.store(self._own, [1.0, *self.policy.state.tolist()])

    def begin_step(self, samples: int) -> None:
        """Begin the step after `samples` samples of the run."""
        self._first = samples
        self._parts.zero_()

    def add_totals(self, totals: StepTotals) -> None:
        """Add this rank's parts of the losses and tokens of the step."""
        if self.uses_losses:
            losses, tokens = self._parts
            totals.add_per_microbatch(**{DATASET_LOSSES: losses, DATASET_TOKENS: tokens})

    def end_step(self, result: StepResult) -> None:
        """Add the losses and tokens of the step."""
        if self.uses_losses:
            for row, name in zip(self.sums, (DATASET_LOSSES, DATASET_TOKENS), strict=True):
                row += [result.totals[vector_name(name, dataset)] for dataset in range(len(row))]

    def end_restore(self) -> None:
        """Go on where the run was; with a checkpoint of a run that had no policy, or another one, that one begins."""
        found, (has_own, *own) = self.values(MIXTURE), self.values(self._own)
        if any(found):
            count = numbers(self.sums.shape[1])
            self.weights = MixtureWeights.from_numbers(found[:count])
            self.sums[:] = np.array(found[count:]).reshape(self.sums.shape)
        if has_own:
            self.policy.state[:] = own
        self.apply_weights()

    def _add_loss(self, index: int, micro_batch: MicroBatch, loss: Tensor) -> None:
        sample = self._first + self._shape.rows(index, self._rank)[0]
        dataset, _ = self._blend.locate(order_index(sample, self._config.data.skip))
        self._parts[0, dataset] += loss
        self._parts[1, dataset] += micro_batch.loss_tokens


class PolicyUpdates(Hook):
    """Updates the weights every `data.policy_every` steps. Comes before the saves of a step."""

    def __init__(self, state: PolicyState, reporter: Reporter) -> None:
        self._state = state
        self._reporter = reporter

    def step_begins(self, run: Run) -> None:
        self._state.begin_step(run.progress.samples)

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        self._state.add_totals(totals)

    def step_ends(self, run: Run, result: StepResult) -> None:
        self._state.end_step(result)
        place = order_index(run.progress.samples, run.config.data.skip)
        if run.progress.step % policy_every(run.config) == 0 and self._state.weights.are_read(place):
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
            answer = _asked(str(run.config.data.policy), state.policy, report)
        found, own, problem = run.mesh.world.control.broadcast(answer, "the data policy's weights")
        if problem:
            raise DataError(problem, hint="correct the policy, or data.policy = fixed")
        after, place = tuple(found), None
        if after != before:
            place = next_place(run.config, run.progress.samples)
            state.weights = state.weights.changed(place, after)
            state.apply_weights()
        state.policy.state[:] = own
        state.sums[:] = 0
        self._reporter.write(MixtureUpdate(run.progress.step, place, _described(run.config, after, means)))


def _asked(name: str, policy: DataPolicy, report: DataReport) -> tuple[list[float], list[float], str]:
    """The shares and the state of a policy after an update, and what is wrong with its weights, if anything is."""
    found = np.asarray(policy.update(report), dtype=np.float64)
    if found.shape != report.weights.shape or not (np.isfinite(found).all() and (found >= 0).all() and found.any()):
        what = f"the data policy {name} has found {found.tolist()} after step {report.step}"
        return [], [], f"{what}: not {len(report.weights)} weights of 0 or above, and some above 0"
    return list(shares(found.tolist())), policy.state.tolist(), ""


def _described(config: RunConfig, weights: tuple[float, ...], losses: np.ndarray) -> dict[str, dict[str, float]]:
    """The weight and, where it is known, the loss of each dataset by number and name."""
    names = [PurePosixPath(prefix).name for prefix in dataset_prefixes(config.data.train)]
    return {
        f"{number} {name}": {"weight": weight} | ({"loss": float(loss)} if math.isfinite(loss) else {})
        for number, (name, weight, loss) in enumerate(zip(names, weights, losses.tolist(), strict=True))
    }
