"""Expert parallelism of a rank: the choice of experts, and the ranks that exchange tokens (`ExpertParallel`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.comm.group import Group
from megascale.ops.routing import Routing, count_choices
from megascale.parallel.experts.capacity import Capacity
from megascale.parallel.experts.dispatcher import Dispatcher, ExpertChoice, PlanDispatch, ReadCounts
from megascale.parallel.experts.rank_tokens import RankTokens
from megascale.parallel.experts.router_losses import RouterLosses
from megascale.parallel.microbatch import MicroBatch
from megascale.record.label import Label


@dataclass(frozen=True)
class ExpertParallel:
    """The `group` of ranks that hold different experts. `routing`: the rule of choice; `plan`: of the exchanges of
    `blocks` of `tokens`; `read`: how counts come to the host; `bias` [layers, experts]: added to scores for the choice;
    `losses`: of routers; `capacity`: of experts in a sequence, if it is limited.
    """

    group: Group
    routing: Routing
    plan: PlanDispatch
    tokens: RankTokens
    blocks: int
    read: ReadCounts
    bias: Tensor | None = None
    losses: RouterLosses | None = None
    capacity: Capacity | None = None

    def route(self, logits: Tensor, batch: MicroBatch, layer: int) -> tuple[Tensor, tuple[Dispatcher, ...]]:
        """Return the weights [t, k] of the experts that tokens choose by their `logits` [t, experts] in a layer, and
        the dispatchers of blocks of tokens: of the saved experts, if the micro-batch has been here before.
        """
        scores, choice = self.routing.scores(logits), batch.expert_choices.get(layer)
        if choice is None or choice.experts is None:
            choice = batch.expert_choices[layer] = self._choose(scores.detach(), batch, layer)
        assert choice.experts is not None, "a choice has experts until its release"
        weights = self.routing.weights(scores, choice.experts)
        if self.losses is not None and torch.is_grad_enabled():
            weights = self.losses.add(weights, logits, scores, choice, layer)
        return weights, choice.dispatchers

    def _choose(self, scores: Tensor, batch: MicroBatch, layer: int) -> ExpertChoice:
        label, size = Label.for_layer(layer, "experts"), scores.shape[1]
        experts = self.routing.choose(scores, None if self.bias is None else self.bias[layer].to(scores.dtype))
        padding, losses = self.tokens.padding(len(experts), batch), dict[str, Tensor]()
        sent = experts if padding is None else experts.masked_fill(padding, size)
        counts = by_block = count_choices(sent.view(1, -1), size)
        if self.capacity is not None:
            dropped = self.capacity.dropped(self.routing.weights(scores, experts), sent, batch, label)
            sent, losses["dropped"] = sent.masked_fill(dropped, size), dropped.sum()
        if self.capacity is not None or self.blocks > 1:
            by_block = count_choices(sent.view(self.blocks, -1), size)
        dispatchers = self.plan(sent, by_block, self.group, label, self.read)
        return ExpertChoice(experts, dispatchers, counts[0], padding, losses)
