"""An element-wise rule that is written as a function (`ops.optimizer.UpdateRule`), over the segments of a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megascale.config.train import OptimizerConfig
from megascale.ops.optimizer import Segment, UpdateInput, UpdateRule
from megascale.optim.compensated import split, whole

CHUNK = 1 << 22
"""Elements that are updated at a time, to bound temporary tensors."""


class FunctionRule:
    """An `Elementwise` rule: w = w - lr (direction + weight_decay w), chunk by chunk."""

    def __init__(
        self, segments: Sequence[Segment], config: OptimizerConfig, rule: UpdateRule, options: Mapping[str, Any]
    ) -> None:
        self._segments = segments
        self._decay = config.weight_decay
        self._rule = rule
        self._options = options

    def step(self, lr: float, step: int, grad_factor: Tensor, skip: Tensor) -> None:
        for segment in self._segments:
            for start in range(0, segment.weight.numel(), CHUNK):
                part = slice(start, start + CHUNK)
                state = {name: values[part] for name, values in segment.state.items()}
                weight, grad = segment.weight[part], segment.grad[part] * grad_factor.to(segment.grad.dtype)
                residual = None if segment.residual is None else segment.residual[part]
                given = UpdateInput(grad, state, step, self._options, weight=whole(weight, residual), lr=lr)
                direction, new_state = self._rule(given)
                apply_direction(weight, residual, direction, lr, self._decay if segment.weight_decay else 0.0, skip)
                copy_unless(skip, state, new_state)


def apply_direction(
    weight: Tensor, residual: Tensor | None, direction: Tensor, lr: float, decay: float, skip: Tensor
) -> None:
    """Step along a direction with decoupled weight decay, unless `skip` is 1. `residual`: as in `optim.compensated`."""
    moved = torch.add(whole(weight, residual) * (1 - lr * decay), direction, alpha=-lr)
    if residual is not None:
        moved, rest = split(moved, weight.dtype)
        residual.copy_(torch.where(skip > 0, residual, rest))
    weight.copy_(torch.where(skip > 0, weight, moved))


def copy_unless(skip: Tensor, state: Mapping[str, Tensor], new_state: Mapping[str, Tensor]) -> None:
    """Copy the new state into the old, unless `skip` is 1."""
    for name, values in state.items():
        values.copy_(torch.where(skip > 0, values, new_state[name]))
