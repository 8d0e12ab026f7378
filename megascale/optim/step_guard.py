"""Guards of a step against spikes, on the device and equal on all ranks, with state in checkpoints.

ZClip (Kumar et al. 2025, arXiv:2504.02507) clips gradients to a bound that follows the mean and deviation of norms:

    z = (norm - mean) / (deviation + eps)
    z > threshold:  bound = mean + threshold deviation / (z / threshold)
    mean, variance: moving averages (`alpha`) of clipped norms, begun with the first `warmup` norms

Skipped steps: a step whose loss or gradient norm is more than `sigma` standard deviations above the mean of the last
`window` steps is not applied; it counts among the recent ones all the same, so that a lasting change ends the skips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megascale.comm.mesh import Mesh
from megascale.config.train import OptimizerConfig
from megascale.optim.replicated_state import ReplicatedState
from megascale.parallel.stateful import GlobalTensor

EPS = 1e-6  # added to ZClip's deviation, as its authors do


class StepGuard(ReplicatedState):
    """The bound of gradient norms and the decision to skip a step.

    `zclip` [5], f64: norms seen, their sum and sum of squares in the warm-up, mean, variance. `recent` [2, window + 1],
    f64: losses and norms of the last steps, in a ring; in the last column the steps seen, and those skipped.
    """

    def __init__(self, config: OptimizerConfig, mesh: Mesh, device: torch.device) -> None:
        super().__init__({"zclip": 5, "recent_steps": 2 * (config.skip_window + 1)}, mesh, device)
        self._config = config
        self.zclip, recent = self.flat_tensors()
        self.recent = recent.view(2, -1)
        self._columns = torch.arange(config.skip_window, device=device)

    def bound(self, norm: Tensor, finite: Tensor) -> Tensor:
        """Return ZClip's bound of a norm, infinite without a spike, and update the averages with a finite norm."""
        c, (count, total, squares, mean, variance) = self._config, self.zclip.unbind()
        warm = count >= c.zclip_warmup
        deviation = variance.sqrt()
        z = (norm - mean) / (deviation + EPS)
        spike = warm & (z > c.zclip_threshold)
        bound = torch.where(spike, mean + c.zclip_threshold * deviation / (z / c.zclip_threshold), torch.inf)
        clipped, alpha = torch.minimum(norm, bound), c.zclip_alpha
        count, total, squares = count + 1, total + norm, squares + norm.square()
        first_mean = total / count
        new_mean = torch.where(warm, alpha * mean + (1 - alpha) * clipped, first_mean)
        moving = alpha * variance + (1 - alpha) * (clipped - new_mean).square()
        new_variance = torch.where(warm, moving, (squares / count - first_mean.square()).clamp(min=0.0))
        updated = torch.stack([count, total, squares, new_mean, new_variance])
        self.zclip.copy_(torch.where(finite, updated, self.zclip))
        return bound

    def is_spike(self, loss: Tensor, norm: Tensor, finite: Tensor) -> Tensor:
        """Return True if the step is to be skipped, and remember a finite step's loss (per token) and norm."""
        window, values = self._config.skip_window, torch.stack([loss, norm])
        seen, ring = self.recent[0, -1].clone(), self.recent[:, :-1]
        deviation, mean = torch.std_mean(ring, dim=1)
        spike = finite & (seen >= window) & (values > mean + self._config.skip_sigma * deviation).any()
        here = (self._columns == seen % window) & finite
        ring.copy_(torch.where(here, values.unsqueeze(1), ring))
        self.recent[:, -1] += torch.stack([finite, spike]).double()
        return spike

    def begin_load(self, saved: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> dict[str, GlobalTensor]:
        """Begin anew also where the checkpoint has another window."""
        sizes = {name: tensor.shape for name, tensor in self.global_tensors().items()}
        return super().begin_load(
            {name: size for name, size in saved.items() if tuple(size) == sizes.get(name)}, config
        )
