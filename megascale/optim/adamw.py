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
        self._groups: list[tuple[float, Sequence[list[Tensor]]]] = []
        first, second = self.state_names
        for decays in (True, False):
            each = [(s.weight, s.grad, s.state[first], s.state[second]) for s in segments if s.decays is decays]
            if each:
                lists = [list(tensors) for tensors in zip(*each, strict=True)]
                self._groups.append((config.weight_decay * decays, lists))

    def step(self, lr: float, step: int, skip: Tensor) -> None:
        c = self._config
        for tensor in self._steps:
            tensor.fill_(step if c.bias_correction else math.inf)  # 1 - beta^inf corrects nothing
        # the kernel itself: torch.optim's class would import torch's compiler, a second of every rank's start
        for weight_decay, lists in self._groups:
            torch._fused_adamw_(
                *lists, [], self._steps * len(lists[0]), lr=lr, weight_decay=weight_decay, beta1=c.betas[0],
                beta2=c.betas[1], eps=c.eps, amsgrad=False, maximize=False, found_inf=skip,
            )  # fmt: skip
