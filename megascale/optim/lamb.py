"""LAMB: Adam updates scaled by a trust ratio for each matrix (You et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.config.train import OptimizerConfig
from megascale.ops.optimizer import Segment


class Lamb:
    """LAMB, algorithm 2 of You et al. 2020 with the identity for phi; m and v as in Adam:

        u = m / (sqrt(v) + eps) + weight_decay w
        w = w - lr |w| / |u| u

    q, k and v, and gate and up, have a trust ratio |w| / |u| each. It is 1 if a norm is zero, and for norms and
    biases, as in NVIDIA's FusedLAMB. Both phases use torch's fused kernels, which change nothing in a skipped step.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        with_decay = [s for s in segments if s.weight_decay]
        self._weights = [s.weight for s in segments]
        self._updates = [s.grad for s in segments]  # u overwrites the gradient
        first, second = self.state_names
        self._moments = [s.state[first] for s in segments], [s.state[second] for s in segments]
        self._with_decay = [s.weight for s in with_decay], [s.grad for s in with_decay]
        self._matrix_updates = [s.grad for s in segments if s.is_matrix]
        steps = [torch.zeros((), dtype=torch.float32, device=s.weight.device) for s in segments[:1]]
        self._steps = steps * len(segments)
        self._config = config

    def compute_updates(self, step: int, skip: Tensor) -> None:
        c = self._config
        for tensor in self._steps[:1]:
            tensor.fill_(step if c.bias_correction else math.inf)  # 1 - beta^inf corrects nothing
        # AdamW with the gradients in place of the weights: the decay term, lr x weight_decay = 1, cancels the gradient,
        # which leaves -lr times Adam's update, the update itself with lr = -1.
        torch._fused_adamw_(
            self._updates, self._updates, *self._moments, [], self._steps, lr=-1.0, weight_decay=-1.0,
            beta1=c.betas[0], beta2=c.betas[1], eps=c.eps, amsgrad=False, maximize=False, found_inf=skip,
        )  # fmt: skip
        weights, updates = self._with_decay
        _add_scaled(updates, weights, c.weight_decay, skip)

    def apply_updates(self, lr: float, norms: Tensor, skip: Tensor) -> None:
        if self._matrix_updates:
            weight_norm, update_norm = norms
            nonzero = (weight_norm > 0) & (update_norm > 0) & (skip == 0)
            ratios = torch.where(nonzero, weight_norm / update_norm, 1.0)
            torch._foreach_mul_(self._matrix_updates, ratios.to(self._matrix_updates[0].dtype).unbind())
        _add_scaled(self._weights, self._updates, -lr, skip)


def _add_scaled(tensors: list[Tensor], addends: list[Tensor], factor: float, skip: Tensor) -> None:
    """Add factor x addend to every tensor, unless `skip` is 1: a fused SGD step."""
    torch._fused_sgd_(
        tensors, addends, [], lr=-factor, weight_decay=0.0, momentum=0.0, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=False, found_inf=skip,
    )  # fmt: skip
