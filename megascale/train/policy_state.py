"""The state of a data policy (`data.blend_policy`): weights of the blend, losses and tokens since the last update."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from megascale.catalog.data import DATA_POLICIES
from megascale.comm.mesh import Mesh
from megascale.config.data import DataConfig
from megascale.data.mix.batch_shape import BatchShape
from megascale.data.mix.data_policy import DataPolicy, MixtureWeights, numbers, shares
from megascale.data.mix.skipped_ranges import order_index
from megascale.optim.replicated_state import ReplicatedState
from megascale.parallel.microbatch import MicroBatch
from megascale.plan.account.step_totals import DATASET_LOSSES, DATASET_TOKENS, vector_name
from megascale.train.step_totals import StepTotals

MIXTURE = "data_policy.mixture"  # name of the saved weights, and of losses and tokens by dataset since the last update


class PolicyState(ReplicatedState):
    """The weights of the mixture, losses and tokens [datasets] since the last update, and the policy with its state.

    `shape`: of a step's batch. `change_weights`: lets the loader follow new weights. If the policy `uses_losses`, the
    pipeline tells `add_loss` those of micro-batches, of one sample each, on the last stage.
    """

    def __init__(
        self, data: DataConfig, shape: BatchShape, change_weights: Callable[[MixtureWeights], None], mesh: Mesh,
        device: torch.device,
    ) -> None:  # fmt: skip
        card, train = DATA_POLICIES[str(data.blend_policy)], data.train
        assert isinstance(train, list), "a policy changes the weights of a blend"
        self.weights = MixtureWeights.first([weight for weight, _ in train])
        self.policy: DataPolicy = card.load()(np.array(shares(self.weights.newest)))
        self.uses_losses = bool(card.facts.get("uses_losses"))
        self.sums = np.zeros((2, len(train)))
        self._own = f"data_policy.{card.name}"
        sizes = {MIXTURE: numbers(len(train)) + self.sums.size, self._own: 1 + len(self.policy.state)}
        super().__init__(sizes, mesh, device)
        self._skip, self._rank = data.skip_samples, mesh.coord.dp
        self._shape = shape
        self._change_weights = change_weights
        self._parts = torch.zeros(self.sums.shape, dtype=torch.float64, device=device)  # of this rank, in this step
        self._first = 0
        self._blend = self.weights.blend()

    def apply_weights(self) -> None:
        """Read samples by the present weights from now on."""
        self._blend = self.weights.blend()
        self._change_weights(self.weights)

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

    def end_step(self, totals: Mapping[str, float]) -> None:
        """Add the losses and tokens of the step."""
        if self.uses_losses:
            for row, name in zip(self.sums, (DATASET_LOSSES, DATASET_TOKENS), strict=True):
                row += [totals[vector_name(name, dataset)] for dataset in range(len(row))]

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

    def add_loss(self, index: int, micro_batch: MicroBatch, loss: Tensor) -> None:
        """Add the loss of a micro-batch to that of its dataset."""
        sample = self._first + self._shape.rows(index, self._rank)[0]
        dataset, _ = self._blend.locate(order_index(sample, self._skip))
        self._parts[0, dataset] += loss
        self._parts[1, dataset] += micro_batch.loss_tokens
