"""The choice of experts for tokens: scores, the experts with the largest scores, and their weights.

    score    s = softmax(z), sigmoid(z) or sqrt(softplus(z)), of logits z [t, experts]
    choice   the k experts with the largest s + bias, of equal ones the first; with groups only those of the best groups
    weight   s of the chosen experts, without the bias; optionally divided by their sum; times a scale

The mathematics is that of Mixtral (softmax), DeepSeek-V2 (groups) and DeepSeek-V3 (sigmoid, bias, sums of two).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.catalog.layers import ROUTER_SCORES
from megascale.config.model import ModelConfig

TINY = 1e-20  # added to a sum of weights, of scores that may all be 0


def softmax(logits: Tensor) -> Tensor:
    """Return the softmax over experts."""
    return logits.softmax(-1)


def sigmoid(logits: Tensor) -> Tensor:
    """Return the sigmoid of each logit."""
    return logits.sigmoid()


def sqrt_softplus(logits: Tensor) -> Tensor:
    """Return the square root of each logit's softplus, a constant below -80: one that underflows has no gradient."""
    return F.softplus(logits.clamp(min=-80)).sqrt()


@dataclass(frozen=True)
class Routing:
    """The rule by which tokens choose experts, as `[model]` describes it."""

    model: ModelConfig

    def scores(self, logits: Tensor) -> Tensor:
        """Return the scores [t, experts] of logits in fp32, or in fp64."""
        scores: Tensor = ROUTER_SCORES[self.model.router_score].load()(logits)
        return scores

    def choose(self, scores: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the numbers [t, k] of the chosen experts, those of larger keys first. `bias` [experts]: added to the
        scores.
        """
        keys = scores if bias is None else scores + bias
        if self.model.router_groups > 1:
            keys = keys.masked_fill(~self._in_best_groups(keys), -torch.inf)
        return largest(keys, self.model.experts_per_token)

    def weights(self, scores: Tensor, experts: Tensor) -> Tensor:
        """Return the weights [t, k] of the chosen `experts`, differentiable in the scores."""
        weights = scores.gather(-1, experts)
        if self.model.router_normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        return weights * self.model.router_scale

    def _in_best_groups(self, keys: Tensor) -> Tensor:
        """Return a mask [t, experts] of the experts in the best groups. A group's experts follow each other."""
        model = self.model
        by_group = keys.unflatten(-1, (model.router_groups, -1))
        values = by_group.topk(2, -1).values.sum(-1) if model.router_group_value == "top2" else by_group.amax(-1)
        best = torch.zeros_like(values, dtype=torch.bool).scatter_(-1, largest(values, model.router_top_groups), True)
        return best.repeat_interleave(by_group.shape[-1], -1)


def largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest values of each row, the first of equal ones first: `topk` takes any."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def count_choices(chosen: Tensor, size: int) -> Tensor:
    """Count each of `size` experts in each row of `chosen` [n, slots], where `size` stands for none: [n, size]. The
    host does not wait for the device.
    """
    counts = chosen.new_zeros(len(chosen), size + 1).scatter_add_(1, chosen, torch.ones_like(chosen))
    return counts[:, :-1].contiguous()
