"""Losses of routers: golden numbers, gradients by finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.catalog.layers import ROUTER_SCORES
from megascale.comm.group import single_rank_group
from megascale.config.model import ModelConfig
from megascale.config.moe import MoeConfig
from megascale.ops.routing import Routing
from megascale.parallel.experts.dispatcher import ExpertChoice
from megascale.parallel.experts.rank_tokens import RankTokens
from megascale.parallel.experts.router_losses import RouterLosses
from tests.runs import LLAMA

TOKENS, EXPERTS = 6, 4

# logits sin(1 + 3 t + 5 e) of two samples of three tokens, of which a router has position after position
LOGITS = torch.tensor(
    [[math.sin(1 + 3 * t + 5 * e) for e in range(EXPERTS)] for t in range(TOKENS)], dtype=torch.float64
)
BY_POSITION = LOGITS.view(2, 3, EXPERTS).transpose(0, 1).reshape(TOKENS, EXPERTS)


def model(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(LLAMA | {"seq_length": 3, "experts": EXPERTS, "experts_per_token": 2} | changes)


def gradient_and_losses(moe: MoeConfig, of: ModelConfig, logits: Tensor) -> tuple[Tensor, dict[str, float]]:
    """The gradient of the weighted losses by the logits, of a step with one label, and the losses."""
    counts = {"loss_tokens": torch.ones(()), "routed": torch.tensor(TOKENS), "samples": 2}
    losses = RouterLosses(moe, of, RankTokens(3, 2), single_rank_group("tp"), **counts)
    losses.before = torch.arange(1.0, 1 + EXPERTS).expand(of.num_layers, -1)
    leaf, routing = logits.clone().requires_grad_(), Routing(of)
    scores = routing.scores(leaf)
    experts = routing.choose(scores.detach())
    choice = ExpertChoice(experts, (), torch.zeros(EXPERTS))
    weights = losses.add(routing.weights(scores, experts), leaf, scores, choice, 0)
    (gradient,) = torch.autograd.grad(weights, leaf, torch.zeros_like(weights))
    return gradient, {name: float(value) for name, value in choice.losses.items()}


@pytest.mark.parametrize(
    ("score", "balance", "group", "expected"),
    [
        ("softmax", "sequence", 1, 1.0523125948932155), ("softmax", "group", 2, 1.0104921978254942),
        ("sigmoid", "sequence", 1, 1.0224800941843566), ("sigmoid", "group", 2, 1.0023444478005339),
    ],
)  # fmt: skip
def test_losses_have_the_published_values(score: str, balance: Any, group: int, expected: float) -> None:
    moe = MoeConfig(balance=balance, balance_group=group, z_loss_weight=1.0)
    _, losses = gradient_and_losses(moe, model(router_score=score), BY_POSITION)
    assert losses == pytest.approx({"balance": expected, "z": 2.501027230367112}, rel=1e-14)


def test_the_first_token_s_experts_and_weights() -> None:
    routing = Routing(model())
    scores = routing.scores(LOGITS)
    experts = routing.choose(scores)
    assert experts[0].tolist() == [0, 1]
    assert routing.weights(scores, experts)[0].tolist() == pytest.approx([0.7541531129185027, 0.2458468870814972])
    counts = [torch.bincount(sample.reshape(-1), minlength=EXPERTS).tolist() for sample in experts.view(2, 3, 2)]
    assert counts == [[2, 2, 1, 1], [1, 2, 2, 1]]


@pytest.mark.parametrize("balance", ["none", "sequence", "group", "step"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_gradients_are_those_of_finite_differences(balance: Any, score: str) -> None:
    """Choices are constant in a neighbourhood."""
    group = {"balance_group": 2} if balance == "group" else {}
    moe = MoeConfig(balance=balance, balance_weight=0.3, z_loss_weight=0.1, **group)
    of, weights = model(router_score=score), {"balance": 0.3, "z": 0.1}
    gradient, _ = gradient_and_losses(moe, of, BY_POSITION)

    def total(logits: Tensor) -> float:
        return sum(weights[name] * loss for name, loss in gradient_and_losses(moe, of, logits)[1].items())

    step = 1e-6
    for token in range(TOKENS):
        for expert in range(EXPERTS):
            change = torch.zeros_like(BY_POSITION)
            change[token, expert] = step
            difference = (total(BY_POSITION + change) - total(BY_POSITION - change)) / (2 * step)
            assert float(gradient[token, expert]) == pytest.approx(difference, abs=1e-9)


@pytest.mark.parametrize("score", ROUTER_SCORES.names())
def test_scores_of_small_logits_have_gradients(score: str) -> None:
    """Also where a score underflows in fp32, whose gradient is then 0."""
    logits = torch.tensor([[-110.0, -90.0, -20.0, 3.0]], requires_grad=True)
    scores = Routing(model(router_score=score)).scores(logits)
    (gradient,) = torch.autograd.grad(scores.sum(), logits)
    expected = torch.autograd.functional.jacobian(
        lambda z: Routing(model(router_score=score)).scores(z).sum(), logits.double()
    )
    torch.testing.assert_close(gradient, expected.float(), rtol=1e-6, atol=1e-12)
