"""The learning rate of a step."""

from __future__ import annotations

from collections.abc import Callable

from megascale.catalog.decays import DECAYS
from megascale.config.train import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int) -> Callable[[int], float]:
    """The learning rate as a function of the step, counted from 1, in a run of `steps`.

    It rises linearly to lr over `warmup_steps`, then follows `decay` and would reach min_lr in the step after the last:
    no step trains at a rate of 0.
    """
    curve = DECAYS[config.decay].load()
    left = steps - config.warmup_steps
    decay_steps = min(config.decay_steps or max(steps // 10, 1), left)  # a fall cannot begin before the warm-up ends

    def at(step: int) -> float:
        if step <= config.warmup_steps:
            return config.lr * step / config.warmup_steps
        share = curve(step - config.warmup_steps, left + 1, decay_steps)
        return config.min_lr + (config.lr - config.min_lr) * share

    return at
