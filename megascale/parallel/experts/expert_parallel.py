"""Expert parallelism of a rank: the choice of experts, and the ranks that exchange tokens (`ExpertParallel`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.comm.group import Group
from megascale.ops.routing import Routing
from megascale.parallel.experts.exchange import Exchange, ReadCounts, make_exchange
from megascale.parallel.experts.route import Route
from megascale.parallel.microbatch import MicroBatch
from megascale.record.label import Label


@dataclass(frozen=True)
class ExpertParallel:
    """The `group` of ranks that hold different experts. `routing`: the rule of choice; `read`: how counts come to the
    host.
    """

    group: Group
    routing: Routing
    read: ReadCounts

    def route(self, scores: Tensor, batch: MicroBatch, layer: int) -> tuple[Tensor, Exchange]:
        """Return the experts [t, k] that tokens choose by their `scores` [t, experts] in a layer, and the exchange of
        their rows: the saved ones, if the micro-batch has been here before.
        """
        route = batch.routes.get(layer)
        if route is None or route.experts is None:
            experts = self.routing.choose(scores.detach())
            route = batch.routes[layer] = Route(experts, None, _count(experts, scores.shape[1]))
        assert route.experts is not None, "a route has experts until its release"
        if route.exchange is None:
            label = Label.for_layer(layer, "experts")
            route.exchange = make_exchange(route.experts, route.counts, self.group, label, self.read)
        return route.experts, route.exchange


def _count(experts: Tensor, size: int) -> Tensor:
    """Count the slots of each of `size` experts, without a wait for the device."""
    chosen = experts.view(-1)
    return torch.zeros(size, dtype=torch.int64, device=experts.device).scatter_add_(0, chosen, torch.ones_like(chosen))
