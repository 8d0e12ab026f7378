"""AdamW with torch's fused kernel, which clips the gradient and updates weights and both moments in one pass. On a GPU
`ops.triton_adamw` serves in its place.

Memory traffic of a step in bytes per parameter, with bf16 weights and fp32 optimizer state:

| pass | read | written |
|---|---|---|
| gradient norm | gradient 4 | |
| fused AdamW | gradient, master, two moments 16 | gradient, master, two moments 16 |
| copy to weights | master 4 | weight 2 |
| sum | 24 | 18 |

The kernel writes the clipped gradient back although nothing reads the gradient: its `grad_scale` always does.
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
        self._steps = [torch.zeros((), dtype=torch.float32, device=s.weight.device) for s in segments[:1]]
        self._with_decay = [s for s in segments if s.weight_decay]
        self._without_decay = [s for s in segments if not s.weight_decay]

    def step(self, lr: float, step: int, grad_factor: Tensor, skip: Tensor) -> None:
        for tensor in self._steps:
            tensor.fill_(step if self._config.bias_correction else math.inf)  # 1 - beta^inf corrects nothing
        scale = grad_factor.reciprocal().float()  # the kernel divides by its scale
        self._update(self._with_decay, lr, self._config.weight_decay, grad_factor, scale, skip)
        self._update(self._without_decay, lr, 0.0, grad_factor, scale, skip)

    def _update(
        self, segments: list[Segment], lr: float, weight_decay: float, factor: Tensor, scale: Tensor, skip: Tensor
    ) -> None:
        """Run the kernel, without torch.optim: its import of torch's compiler takes a second at every rank's start."""
        if not segments:
            return
        c, (first, second) = self._config, self.state_names
        grads = [s.grad for s in segments]
        fp64 = grads[0].dtype == torch.float64  # scaled separately, because the kernel's scale is fp32
        if fp64:
            torch._foreach_mul_(grads, factor)
        torch._fused_adamw_(
            [s.weight for s in segments], grads, [s.state[first] for s in segments],
            [s.state[second] for s in segments], [], self._steps * len(segments), lr=lr, weight_decay=weight_decay,
            beta1=c.betas[0], beta2=c.betas[1], eps=c.eps, amsgrad=False, maximize=False,
            grad_scale=None if fp64 else scale, found_inf=skip,
        )  # fmt: skip
