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
        groups = []
        for decays in (True, False):
            members = [s for s in segments if s.decays is decays]
            if members:
                groups.append({"params": [s.weight for s in members], "weight_decay": config.weight_decay * decays})
        beta1, beta2 = config.betas
        self._correct = config.bias_correction
        self._torch = torch.optim.AdamW(groups, lr=0.0, betas=(beta1, beta2), eps=config.eps, fused=True)
        for segment in segments:
            segment.weight.grad = segment.grad
            # torch makes its state at the first step; ours must lie in the buffers that checkpoints are read into
            self._torch.state[segment.weight] = {"step": torch.zeros((), device=segment.weight.device), **segment.state}

    def step(self, lr: float, step: int, skip: Tensor) -> None:
        self._torch.found_inf = skip  # type: ignore[attr-defined]  # what torch's GradScaler sets; read on the device
        for group in self._torch.param_groups:
            group["lr"] = lr
        for state in self._torch.state.values():
            # it counts before it computes; 1 - beta^inf corrects nothing
            state["step"].fill_(step - 1 if self._correct else math.inf)
        self._torch.step()
