"""AdamW by torch's fused kernel, which updates weights and both moments in one pass."""

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
        self._decaying = [s for s in segments if s.decays]
        self._others = [s for s in segments if not s.decays]

    def step(self, lr: float, step: int, skip: Tensor) -> None:
        for tensor in self._steps:
            tensor.fill_(step if self._config.bias_correction else math.inf)  # 1 - beta^inf corrects nothing
        self._update(self._decaying, lr, self._config.weight_decay, skip)
        self._update(self._others, lr, 0.0, skip)

    def _update(self, segments: list[Segment], lr: float, weight_decay: float, skip: Tensor) -> None:
        """The kernel itself: torch.optim's class would import torch's compiler, a second of every rank's start."""
        if not segments:
            return
        c, (first, second) = self._config, self.state_names
        torch._fused_adamw_(
            [s.weight for s in segments], [s.grad for s in segments], [s.state[first] for s in segments],
            [s.state[second] for s in segments], [], self._steps * len(segments), lr=lr, weight_decay=weight_decay,
            beta1=c.betas[0], beta2=c.betas[1], eps=c.eps, amsgrad=False, maximize=False, found_inf=skip,
        )  # fmt: skip
