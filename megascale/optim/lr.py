"""Learning rate schedule: linear warm-up, then a decay of `catalog.decays`."""

from __future__ import annotations

from collections.abc import Callable

from megascale.catalog.decays import DECAYS
from megascale.config.batch_rampup import BatchSizes
from megascale.config.train import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int, sizes: BatchSizes | None = None) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, counted from 1, for a run of `steps`. `sizes`: of batches
    during a ramp-up, if there is one.

    The rate rises linearly to lr over `warmup_steps`, then decays toward min_lr, reached one step after the last of the
    run, or of `schedule_steps`: no step of them trains at a rate of 0.
    """
    if sizes is not None:
        return _by_samples(config, steps, sizes)
    curve = DECAYS[config.decay].load()
    steps = config.schedule_steps or steps
    after_warmup = steps - config.warmup_steps
    decay_steps = min(config.decay_steps or max(steps // 10, 1), after_warmup)

    def at(step: int) -> float:
        if step <= config.warmup_steps:
            return config.lr * step / config.warmup_steps
        fraction = curve(step - config.warmup_steps, after_warmup + 1, decay_steps)
        return config.min_lr + (config.lr - config.min_lr) * fraction

    return at


def _by_samples(config: OptimizerConfig, steps: int, sizes: BatchSizes) -> Callable[[int], float]:
    """Return the function of samples that `learning_rate` is with `sizes.total` samples a step: `warmup_steps` and
    `decay_steps` count in steps of the whole batch, which has fewer samples while the batch grows.
    """
    curve, unit, total = DECAYS[config.decay].load(), sizes.total, sizes.before_step(steps + 1)
    total = config.schedule_steps * unit if config.schedule_steps else total
    warmup = config.warmup_steps * unit
    decay_steps = config.decay_steps or max(total // unit // 10, 1)
    decay = min((decay_steps + 1) * unit, total - warmup + unit) - 1

    def at(step: int) -> float:
        samples = sizes.before_step(step + 1)
        if samples <= warmup:
            return config.lr * samples / warmup
        fraction = curve(samples - warmup, total - warmup + unit, decay)
        return config.min_lr + (config.lr - config.min_lr) * fraction

    return at
