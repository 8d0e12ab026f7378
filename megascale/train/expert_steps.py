"""Experts in training: the state that balances them, and what a step does for it (`ExpertState`, `ExpertSteps`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megascale.comm.mesh import Mesh
from megascale.comm.totals import sum_over_job
from megascale.core.errors import MegascaleError
from megascale.optim.replicated_state import ReplicatedState
from megascale.parallel.stateful import BALANCE_BIAS, GlobalTensor
from megascale.plan.account.step_totals import EXPERT_LOAD, ROUTER_TOTALS
from megascale.train.batch_totals import count_tokens
from megascale.train.run import Hook, Run, StepResult
from megascale.train.step import is_logged_step
from megascale.train.step_totals import StepTotals

BIAS, CHOICES = BALANCE_BIAS, "expert_choices"
"""Names of the saved vectors [layers x experts]: the bias for the choice, and the choices of the last step."""


class ExpertState(ReplicatedState):
    """The bias of each expert, and with the balance of steps the choices of the last step, by layer of the model:
    those of `names` in a `shape` of layers and experts.
    """

    def __init__(self, names: Iterable[str], shape: tuple[int, int], mesh: Mesh, device: torch.device) -> None:
        super().__init__(dict.fromkeys(names, math.prod(shape)), mesh, device)
        self._shape = shape

    def begin_load(self, saved: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> dict[str, GlobalTensor]:
        """Have the first rank read all that the saved run had: none of it may begin anew."""
        had = {BIAS, CHOICES} if config.get("moe", {}).get("balance") == "step" else {BIAS}
        own = {} if self._mesh.rank else self.global_tensors()
        return super().begin_load(saved, config) | {name: own[name] for name in had & own.keys()}

    def layers(self, name: str) -> Tensor | None:
        """Return a view [layers, experts] of a vector; None if the run has none."""
        return self.vector(name).view(self._shape) if name in self.global_tensors() else None


class ExpertSteps(Hook):
    """Counts the choices of a step's tokens, for bias and metrics."""

    def __init__(self, state: ExpertState) -> None:
        self._state = state
        self._choices: Tensor | None = None
        self._loads: Callable[[], list[float]] | None = None

    def add_totals(self, run: Run, totals: StepTotals) -> None:
        """Sum the choices [layers, experts] and the slots of all tokens over the job; a token has a choice in each of
        its slots, whatever the layout.
        """
        model, device, coord = run.config.model, run.device.torch_device, run.mesh.coord
        sums = torch.zeros(model.total_layers * model.experts + 1, dtype=torch.float64, device=device)
        choices, slots = sums[:-1].view(model.total_layers, model.experts), sums[-1]
        if coord.pp == run.mesh.placement.ends[0] and coord.tp == 0:
            tokens = count_tokens(totals.batch, run.config.batch.micro * model.seq_length)
            slots.fill_(tokens * model.experts_per_token)
        parts = dict.fromkeys(ROUTER_TOTALS, choices.new_zeros(()))
        for micro_batch in totals.batch.micro_batches:
            for layer, choice in micro_batch.expert_choices.items():
                choices[layer] += choice.counts
                for name, loss in choice.losses.items():
                    parts[name] = parts[name] + loss.double() / (model.total_layers - model.dense_layers)
        sum_over_job(run.mesh, sums, label="choices of experts")
        first, self._choices = run.mesh.rank == 0, choices
        loads = choices / choices.mean(1, keepdim=True).clamp(min=1)
        logged = first and is_logged_step(run.config.train, run.progress.step + 1)
        self._loads = run.device.copy_to_host(loads.float().view(-1)) if logged else None
        parts["dropped"] = parts["dropped"] / slots
        lost = (choices[model.dense_layers :].sum(1) - slots).abs().sum()
        routed = 1 - lost / (slots * (model.total_layers - model.dense_layers))
        parts[EXPERT_LOAD] = loads.amax(1) * first
        totals.add(routed=routed if first else 0.0, **parts)

    def step_ends(self, run: Run, result: StepResult) -> None:
        """Record the loads of a logged step. Move biases towards equal loads, after a step that was applied.

        Raises: MegascaleError if a token was not routed, or twice
        """
        if (routed := result.totals["routed"]) != 1:
            message = f"step {run.progress.step} lacks choices of experts, or has too many: {1 - routed:.1e} of them"
            raise MegascaleError(message, hint="a defect: please report the configuration")
        choices, bias, before = self._choices, self._state.layers(BIAS), self._state.layers(CHOICES)
        if self._loads is not None:  # copied before the totals, which the host has waited for
            run.mesh.recorder.log.tables.set_expert_loads(run.progress.step, run.config.model.experts, self._loads())
        if choices is None or result.totals["skipped"]:
            return
        if bias is not None:
            bias += run.config.moe.bias_rate * (choices.mean(1, keepdim=True) - choices).sign()
        if before is not None:
            before.copy_(choices)
