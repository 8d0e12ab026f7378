"""Updates of elements: rules that may be called with any range of a shard, as functions and as fused kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from megascale.catalog.optimizers import REST
from megascale.core.errors import ConfigError, Problem
from megascale.layout.param_groups import ParamGroup
from megascale.ops.optimizer import Elementwise, Segment, UpdateInput, UpdateRule, is_function
from megascale.optim.clipping import Clipping, counted_elements
from megascale.optim.compensated import KeptUpdates, split, whole
from megascale.optim.optimizer_shard import OptimizerShard
from megascale.optim.updates import Parts, Updates

CHUNK = 1 << 22  # elements that are updated at a time, to bound temporary tensors


class ElementUpdates(Updates):
    """A rule for every group of elements in each shard, and its segments of the shard."""

    def __init__(self, parts: Parts) -> None:
        self._rules = [
            [
                (group, build_rule(shard, group, parts))
                for group in dict.fromkeys(group for group, _ in shard.ranges)
                if group.facts["unit_of_work"] == "elements"
            ]
            for shard in parts.shards
        ]
        rules = [rule for rules in self._rules for _, rule in rules]
        self.writes_rounded = all(getattr(rule, "writes_rounded", False) for rule in rules)

    def apply(self, index: int, lr: float, step: int, clipping: Clipping) -> None:
        for group, rule in self._rules[index]:
            rule.step(lr * group.lr_mult, step, clipping.grad_factor, clipping.skip)


def build_rule(shard: OptimizerShard, group: ParamGroup, parts: Parts) -> Elementwise:
    """Build the rule of a group over its segments of a shard.

    Raises: ConfigError for a class and compensated weights, which only functions add to.
    """
    ranges = [item for other, item in shard.ranges if other == group]
    segments = [shard.segment(item) for item in ranges]
    rule, options = parts.rules[group.rule], group.all_options
    if group.rule == REST and shard.residual is not None:
        from megascale.optim.adam import adam, adam_options

        rule, options = adam, adam_options(parts.config)
    if is_function(rule):
        counted = shard.start + counted_elements(shard.bucket, tp=parts.mesh.tp.index)
        starts = [counted - item.start for item in ranges]
        return FunctionRule(segments, group.weight_decay, rule, options, parts.kept, starts)
    if shard.residual is not None:
        problem = f"{group.rule} is a class, which needs master weights in fp32"
        hint = "optimizer.master_weights = full, or a rule that is a function"
        raise ConfigError([Problem("optimizer.name", group.rule, problem, hint)])
    own = {"name": group.rule, "weight_decay": group.weight_decay, "options": dict(options)}
    return cast(type[Elementwise], rule)(segments, parts.config.model_copy(update=own))


@dataclass
class FunctionRule:
    """An `Elementwise` rule by a function: w = w - lr (direction + weight_decay w), chunk by chunk. `counted`: elements
    at the beginning of each segment that this rank counts in `kept`.
    """

    segments: Sequence[Segment]
    weight_decay: float
    rule: UpdateRule
    options: Mapping[str, Any]
    kept: KeptUpdates | None
    counted: Sequence[int]
    state_names: tuple[str, ...] = ()  # the card has them

    def step(self, lr: float, step: int, grad_factor: Tensor, skip: Tensor) -> None:
        for segment, counted in zip(self.segments, self.counted, strict=True):
            for start in range(0, segment.weight.numel(), CHUNK):
                part = slice(start, start + CHUNK)
                state = {name: values[part] for name, values in segment.state.items()}
                weight, grad = segment.weight[part], segment.grad[part] * grad_factor.to(segment.grad.dtype)
                residual = None if segment.residual is None else segment.residual[part]
                given = UpdateInput(grad, state, step, self.options, weight=whole(weight, residual), lr=lr)
                direction, new_state = self.rule(given)
                decay = self.weight_decay if segment.weight_decay else 0.0
                apply_direction(weight, residual, direction, lr, decay, skip, self.kept, counted - start)
                copy_unless(skip, state, new_state)


def apply_direction(
    weight: Tensor, residual: Tensor | None, direction: Tensor, lr: float, decay: float, skip: Tensor,
    kept: KeptUpdates | None = None, counted: int = 0,
) -> None:  # fmt: skip
    """Step along a direction with decoupled weight decay, unless `skip` is 1. `residual`: as in `optim.compensated`;
    of its first `counted` elements [n] the step is added to `kept`.
    """
    before = whole(weight, residual)
    moved = (before * (1 - lr * decay)).add_(direction, alpha=-lr)
    if residual is not None:
        wanted = moved
        moved, rest = split(wanted, weight.dtype)
        if kept is not None and kept.on and counted > 0:
            own = before[:counted]
            kept.add(wanted[:counted] - own, whole(moved[:counted], rest[:counted]) - own, skip)
        torch.where(skip > 0, residual, rest, out=residual)
    torch.where(skip > 0, weight, moved, out=weight)


def copy_unless(skip: Tensor, state: Mapping[str, Tensor], new_state: Mapping[str, Tensor]) -> None:
    """Copy the new state into the old, unless `skip` is 1."""
    for name, values in state.items():
        torch.where(skip > 0, values, new_state[name], out=values)
