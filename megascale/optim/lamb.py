"""LAMB: Adam's updates, each scaled to the norm of the parameter that it changes (You et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.config.train import OptimizerConfig
from megascale.ops.optimizer import Segment


class Lamb:
    """w -= lr |w| / |u| u with u = m / (sqrt(v) + eps) + weight_decay w, m and v as in Adam: algorithm 2 of You et al.
    2020 with the identity for phi. Where a norm is zero the ratio is 1, and so it is for norms and biases, which are no
    matrices, as in NVIDIA's FusedLAMB.

    Both phases are torch's fused kernels, which leave everything as it is in a step that is to be skipped.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        decaying = [s for s in segments if s.weight_decay]
        self._weights = [s.weight for s in segments]
        self._directions = [s.grad for s in segments]
        first, second = self.state_names
        self._moments = [s.state[first] for s in segments], [s.state[second] for s in segments]
        self._decaying = [s.weight for s in decaying], [s.grad for s in decaying]
        self._matrices = [s.grad for s in segments if s.is_matrix]
        self._steps = [torch.zeros((), device=s.weight.device) for s in segments[:1]] * len(segments)
        self._config = config

    def direct(self, step: int, skip: Tensor) -> None:
        c = self._config
        for tensor in self._steps[:1]:
            tensor.fill_(step if c.bias_correction else math.inf)  # 1 - beta^inf corrects nothing
        # AdamW with the gradients in the place of the weights: lr x weight_decay = 1 takes all of them away, and Adam's
        # update, times -lr, is what is left
        torch._fused_adamw_(
            self._directions, self._directions, *self._moments, [], self._steps, lr=-1.0, weight_decay=-1.0,
            beta1=c.betas[0], beta2=c.betas[1], eps=c.eps, amsgrad=False, maximize=False, found_inf=skip,
        )  # fmt: skip
        weights, directions = self._decaying
        _move(directions, weights, c.weight_decay, skip)

    def apply(self, lr: float, norms: Tensor, skip: Tensor) -> None:
        if self._matrices:
            weight, direction = norms
            scales = (weight > 0) & (direction > 0) & (skip == 0)
            ratios = torch.where(scales, weight / direction, 1.0)
            torch._foreach_mul_(self._matrices, ratios.to(self._matrices[0].dtype).unbind())
        _move(self._weights, self._directions, -lr, skip)


def _move(tensors: list[Tensor], along: list[Tensor], by: float, skip: Tensor) -> None:
    """Add `by` times each of `along`, unless the step is to be skipped: plain SGD."""
    torch._fused_sgd_(
        tensors, along, [], lr=-by, weight_decay=0.0, momentum=0.0, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=False, found_inf=skip,
    )  # fmt: skip
