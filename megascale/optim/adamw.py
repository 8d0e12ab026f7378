"""AdamW by torch's fused kernel, which clips the gradient and updates weights and both moments in one pass.

Bytes that a step moves for each parameter, with bf16 weights:

| pass | read | written |
|---|---|---|
| norm | gradient 4 | |
| the kernel | gradient, master, two moments 16 | gradient, master, two moments 16 |
| weights for the next step | master 4 | weight 2 |
| sum | 24 | 18 |

The kernel writes the clipped gradient back, which nothing reads: torch offers no other way to scale in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.config.train import OptimizerConfig
from megascale.ops.optimizer import Segment


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        self._config = config
        self._steps = [torch.zeros((), device=s.weight.device) for s in segments[:1]]
        self._decaying = [s for s in segments if s.weight_decay]
        self._others = [s for s in segments if not s.weight_decay]

    def step(self, lr: float, step: int, factor: Tensor, skip: Tensor) -> None:
        for tensor in self._steps:
            tensor.fill_(step if self._config.bias_correction else math.inf)  # 1 - beta^inf corrects nothing
        scale = factor.reciprocal().float()  # by which the kernel divides
        self._update(self._decaying, lr, self._config.weight_decay, factor, scale, skip)
        self._update(self._others, lr, 0.0, factor, scale, skip)

    def _update(
        self, segments: list[Segment], lr: float, weight_decay: float, factor: Tensor, scale: Tensor, skip: Tensor
    ) -> None:
        """The kernel itself: torch.optim's class would import torch's compiler, a second of every rank's start."""
        if not segments:
            return
        c, (first, second) = self._config, self.state_names
        grads = [s.grad for s in segments]
        exact = grads[0].dtype == torch.float64  # the kernel's scale is f32, which would round them
        if exact:
            torch._foreach_mul_(grads, factor)
        torch._fused_adamw_(
            [s.weight for s in segments], grads, [s.state[first] for s in segments],
            [s.state[second] for s in segments], [], self._steps * len(segments), lr=lr, weight_decay=weight_decay,
            beta1=c.betas[0], beta2=c.betas[1], eps=c.eps, amsgrad=False, maximize=False,
            grad_scale=None if exact else scale, found_inf=skip,
        )  # fmt: skip
