"""Expert parallelism of a rank: the choice of experts, and the ranks that exchange tokens (`ExpertParallel`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.comm.group import Group
from megascale.ops.routing import Routing
from megascale.parallel.experts.capacity import Capacity
from megascale.parallel.experts.dispatcher import Dispatcher, PlanDispatch, ReadCounts
from megascale.parallel.experts.expert_choice import ExpertChoice
from megascale.parallel.experts.router_losses import RouterLosses
from megascale.parallel.microbatch import MicroBatch
from megascale.record.label import Label


@dataclass(frozen=True)
class ExpertParallel:
    """The `group` of ranks that hold different experts. `routing`: the rule of choice; `plan`: of the exchanges of
    `blocks` of tokens; `read`: how counts come to the host; `bias` [layers, experts]: added to scores for the choice;
    `losses`: of routers; `capacity`: of experts in a sequence, if it is limited.
    """

    group: Group
    routing: Routing
    plan: PlanDispatch
    blocks: int
    read: ReadCounts
    bias: Tensor | None = None
    losses: RouterLosses | None = None
    capacity: Capacity | None = None

    def route(self, logits: Tensor, batch: MicroBatch, layer: int) -> tuple[Tensor, tuple[Dispatcher, ...]]:
        """Return the weights [t, k] of the experts that tokens choose by their `logits` [t, experts] in a layer, and
        the dispatchers of blocks of tokens: of the saved experts, if the micro-batch has been here before.
        """
        scores = self.routing.scores(logits)
        choice = self._choice_of(scores.detach(), batch, layer)
        assert choice.experts is not None, "a choice has experts until its release"
        weights = self.routing.weights(scores, choice.experts)
        if self.losses is not None and torch.is_grad_enabled():
            weights = self.losses.add(weights, logits, scores, choice, layer)
        return weights, choice.dispatchers

    def _choice_of(self, scores: Tensor, batch: MicroBatch, layer: int) -> ExpertChoice:
        choice = batch.expert_choices.get(layer)
        if choice is None or choice.experts is None:
            bias = None if self.bias is None else self.bias[layer].to(scores.dtype)
            experts = self.routing.choose(scores, bias)
            chosen = _count(experts.view(1, -1), scores.shape[1])[0]
            choice = batch.expert_choices[layer] = ExpertChoice(experts, (), chosen)
        assert choice.experts is not None, "a choice has experts until its release"
        if not choice.dispatchers:
            choice.dispatchers = self._dispatchers(scores, choice.experts, choice, batch, layer)
        return choice

    def _dispatchers(
        self, scores: Tensor, experts: Tensor, choice: ExpertChoice, batch: MicroBatch, layer: int
    ) -> tuple[Dispatcher, ...]:
        label, counts, size = Label.for_layer(layer, "experts"), choice.counts.unsqueeze(0), scores.shape[1]
        if self.capacity is not None:
            dropped = self.capacity.dropped(self.routing.weights(scores, experts), experts, batch, label)
            experts = experts.masked_fill(dropped, size)
            choice.losses["dropped"] = dropped.sum()
        if self.capacity is not None or self.blocks > 1:
            counts = _count(experts.view(self.blocks, -1), size + 1)[:, :-1].contiguous()
        return self.plan(experts, counts, self.group, label, self.read)


def _count(chosen: Tensor, size: int) -> Tensor:
    """Count the slots of each of `size` experts in each row of `chosen` [n, slots], without a wait for the device."""
    return chosen.new_zeros(len(chosen), size).scatter_add_(1, chosen, torch.ones_like(chosen))
