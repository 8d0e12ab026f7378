"""Expert parallelism of a rank: the choice of experts, and the ranks that exchange tokens (`ExpertParallel`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.comm.group import Group
from megascale.ops.routing import Routing
from megascale.parallel.experts.capacity import Capacity
from megascale.parallel.experts.exchange import Exchange, ReadCounts, make_exchange
from megascale.parallel.experts.expert_choice import ExpertChoice
from megascale.parallel.experts.router_losses import RouterLosses
from megascale.parallel.microbatch import MicroBatch
from megascale.record.label import Label


@dataclass(frozen=True)
class ExpertParallel:
    """The `group` of ranks that hold different experts. `routing`: the rule of choice; `read`: how counts come to the
    host; `bias` [layers, experts]: added to scores for the choice; `losses`: of routers; `capacity`: of experts in a
    sequence, if it is limited.
    """

    group: Group
    routing: Routing
    read: ReadCounts
    bias: Tensor | None = None
    losses: RouterLosses | None = None
    capacity: Capacity | None = None

    def route(self, logits: Tensor, batch: MicroBatch, layer: int) -> tuple[Tensor, Tensor, Exchange]:
        """Return the experts [t, k] that tokens choose by their `logits` [t, experts] in a layer, the experts' weights
        [t, k], and the exchange of rows: the saved experts, if the micro-batch has been here before.
        """
        scores = self.routing.scores(logits)
        choice = self._choice_of(scores.detach(), batch, layer)
        assert choice.experts is not None and choice.exchange is not None, "a choice is complete until its release"
        weights = self.routing.weights(scores, choice.experts)
        if self.losses is not None and torch.is_grad_enabled():
            weights = self.losses.add(weights, logits, scores, choice, layer)
        return choice.experts, weights, choice.exchange

    def _choice_of(self, scores: Tensor, batch: MicroBatch, layer: int) -> ExpertChoice:
        choice = batch.expert_choices.get(layer)
        if choice is None or choice.experts is None:
            bias = None if self.bias is None else self.bias[layer].to(scores.dtype)
            experts = self.routing.choose(scores, bias)
            choice = batch.expert_choices[layer] = ExpertChoice(experts, None, _count(experts, scores.shape[1]))
        assert choice.experts is not None, "a choice has experts until its release"
        if choice.exchange is None:
            choice.exchange = self._exchange(scores, choice.experts, choice, batch, layer)
        return choice

    def _exchange(
        self, scores: Tensor, experts: Tensor, choice: ExpertChoice, batch: MicroBatch, layer: int
    ) -> Exchange:
        label, counts = Label.for_layer(layer, "experts"), choice.counts
        if self.capacity is not None:
            dropped = self.capacity.dropped(self.routing.weights(scores, experts), experts, batch, label)
            experts = experts.masked_fill(dropped, len(counts))
            counts = _count(experts, len(counts) + 1)[:-1]
            choice.losses["dropped"] = dropped.sum()
        return make_exchange(experts, counts, self.group, label, self.read)


def _count(experts: Tensor, size: int) -> Tensor:
    """Count the slots of each of `size` experts, without a wait for the device."""
    chosen = experts.view(-1)
    return torch.zeros(size, dtype=torch.int64, device=experts.device).scatter_add_(0, chosen, torch.ones_like(chosen))
