"""Losses that balance the loads of experts, and keep a router's logits small.

    balance   (1 / R) sum over regions r  E / (k T_r^2)  sum over experts e  c_re  sum over tokens t of r  p_te
    z         (1 / T) sum over tokens t  logsumexp(z_t)^2

for E experts of which a token has k; regions r of T_r tokens, R in all; c_re, the choices of expert e in the region, by
the scores alone (DeepSeek-V3: without bias and groups), a constant for the gradient; p, the scores relative to their
sum; T tokens of the step. A region is a sequence, a group of consecutive samples, or with `step` the whole step, with
the choices by which tokens were routed in the step before. Every term is a sum over tokens times a constant, so no
layout changes it: counts are summed over the ranks that share a region, which only backward waits for. Padding is no
token: T_r is the sum of c_re / k, and no region is empty, as every sample has a document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.comm.collectives import all_reduce
from megascale.comm.group import Group
from megascale.comm.work import Work
from megascale.config.model import ModelConfig
from megascale.config.moe import MoeConfig
from megascale.ops.routing import count_choices, largest
from megascale.parallel.experts.dispatcher import ExpertChoice
from megascale.parallel.experts.rank_tokens import RankTokens
from megascale.record.label import Label


@dataclass
class RouterLosses:
    """The losses of all routers on a rank, for its `tokens`. `group`: the ranks that share regions. `before` [layers,
    experts]: choices in the step before. Of the step `loss_tokens`: labels, by which all gradients are divided;
    `routed`: tokens; `samples`.
    """

    moe: MoeConfig
    model: ModelConfig
    tokens: RankTokens
    group: Group
    before: Tensor | None = None
    loss_tokens: Tensor | None = None
    routed: Tensor | None = None
    samples: int = 0

    def add(self, weights: Tensor, logits: Tensor, scores: Tensor, choice: ExpertChoice, layer: int) -> Tensor:
        """Return the `weights` of experts, through which the gradients of the losses reach logits and scores."""
        shares = scores if self.model.router_score == "softmax" else scores / scores.sum(-1, keepdim=True)
        if choice.padding is not None:
            shares = shares.masked_fill(choice.padding, 0)
        by_regions = self.moe.balance in ("sequence", "group")
        counted = self._count(scores.detach(), choice, layer) if by_regions else None
        return _Losses.apply(weights, shares, logits, self, choice, layer, counted)

    def balance_gradient(
        self, shares: Tensor, choice: ExpertChoice, layer: int, counted: tuple[Tensor, Work] | None
    ) -> Tensor:
        """Return the gradient of the balance loss by `shares` [t, experts], and note the loss in the choice."""
        if counted is not None:
            counts, work = counted
            work.wait()
            factors, regions = self._by_column(counts.to(shares.dtype)), self.samples // self.moe.balance_group
        else:
            assert self.before is not None, "the balance of steps has the choices of the step before"
            counts = self.before[layer].to(shares.dtype)
            factors = counts * self.model.experts / counts.sum().clamp(min=1) / self._of_step(self.routed, shares)
            factors, regions = factors.unsqueeze(0), 1
        gradient = factors / regions
        by_column = shares.view(-1, len(gradient), shares.shape[1])
        choice.losses["balance"] = (by_column * gradient).sum()
        weight = self.moe.balance_weight * self._of_step(self.loss_tokens, shares)
        return (weight * gradient).expand_as(by_column).reshape(shares.shape)

    def z_gradient(self, logits: Tensor, choice: ExpertChoice) -> Tensor:
        """Return the gradient of the z-loss by the logits [t, experts], and note the loss in the choice."""
        tokens, largest_ = self._of_step(self.routed, logits), logits.logsumexp(-1, keepdim=True)
        if choice.padding is not None:
            largest_ = largest_.masked_fill(choice.padding, 0)
        choice.losses["z"] = largest_.square().sum() / tokens
        weight = 2 * self.moe.z_loss_weight * self._of_step(self.loss_tokens, logits)
        return weight / tokens * largest_ * logits.softmax(-1)

    @property
    def _of_dp(self) -> tuple[int, int]:
        """The ranks of dp that share regions, and this rank's index among them."""
        shared = "dp" in self.moe.region_axes(self.tokens.micro)
        return (self.tokens.dp, self.tokens.dp_index) if shared else (1, 0)

    def _of_step(self, count: Tensor | None, like: Tensor) -> Tensor:
        assert count is not None, "a step counts its labels and tokens first"
        return count.to(like.dtype)

    def _count(self, scores: Tensor, choice: ExpertChoice, layer: int) -> tuple[Tensor, Work]:
        """Start to count the choices of each expert by sample [samples, experts], those of the largest scores, over the
        ranks of the group.
        """
        assert choice.experts is not None, "a choice has experts until its release"
        size, k, micro = self.model.experts, self.model.experts_per_token, self.tokens.micro
        ranks, index = self._of_dp
        plain = not self.model.balance_bias and self.model.router_groups == 1
        choices = choice.experts if plain else largest(scores, k)
        choices = choices if choice.padding is None else choices.masked_fill(choice.padding, size)
        by_sample = choices.view(-1, micro, k).transpose(0, 1).reshape(micro, -1)
        counts = choices.new_zeros(ranks, micro, size)
        counts[index] = count_choices(by_sample, size)
        work = all_reduce(self.group, counts, label=Label.for_layer(layer, "choices"), wait=False)
        return counts.flatten(0, 1), work

    def _by_column(self, counts: Tensor) -> Tensor:
        """Return E c / (k T^2) of the region of each sample of this rank [micro, experts]."""
        size, micro = self.moe.balance_group, self.tokens.micro
        regions = counts.view(-1, size, counts.shape[1]).sum(1)
        factors = regions * (self.model.experts * self.model.experts_per_token) / regions.sum(1, keepdim=True).square()
        return factors.repeat_interleave(size, 0).narrow(0, self._of_dp[1] * micro, micro)


class _Losses(torch.autograd.Function):
    """The identity on weights of experts; in backward the gradients of the losses are added."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, shares: Tensor, logits: Tensor, losses: RouterLosses, choice: ExpertChoice,
        layer: int, counted: tuple[Tensor, Work] | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(shares, logits)
        ctx.losses, ctx.choice, ctx.layer, ctx.counted = losses, choice, layer, counted
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (shares, logits), losses, choice = ctx.saved_tensors, ctx.losses, ctx.choice
        balances, bounds = losses.moe.balance != "none", losses.moe.z_loss_weight > 0
        by_shares = losses.balance_gradient(shares, choice, ctx.layer, ctx.counted) if balances else None
        by_logits = losses.z_gradient(logits, choice) if bounds else None
        return grads[0], by_shares, by_logits, None, None, None, None
