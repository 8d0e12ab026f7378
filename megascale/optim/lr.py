"""Learning rate schedule: linear warm-up, then a decay of `catalog.decays`."""

from __future__ import annotations

from collections.abc import Callable

from megascale.catalog.decays import DECAYS
from megascale.config.train import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, counted from 1, for a run of `steps`.

    The rate rises linearly to lr over `warmup_steps`, then decays toward min_lr, reached one step after the last:
    no step trains at a rate of 0.
    """
    curve = DECAYS[config.decay].load()
    after_warmup = steps - config.warmup_steps
    decay_steps = min(config.decay_steps or max(steps // 10, 1), after_warmup)

    def at(step: int) -> float:
        if step <= config.warmup_steps:
            return config.lr * step / config.warmup_steps
        fraction = curve(step - config.warmup_steps, after_warmup + 1, decay_steps)
        return config.min_lr + (config.lr - config.min_lr) * fraction

    return at
