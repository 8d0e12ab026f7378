"""The global batch of each step, which grows during the ramp-up of `batch.rampup`, as in Megatron-LM.

The batch begins with `start` sequences and grows by `increment` to `batch.global`, at equal distances of samples over
the first `samples` of the run. It is a function of the samples before a step alone, so that a resume goes on exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megascale.config.train import BatchConfig, OptimizerConfig, TrainConfig


@dataclass(frozen=True)
class BatchSizes:
    """Sequences in the steps of a run: `start`, `start + increment`, ... up to `total`, over `samples` samples."""

    total: int
    start: int
    increment: int
    samples: int

    @property
    def levels(self) -> int:
        """Increments from the first to the last size."""
        return (self.total - self.start) // self.increment

    @property
    def common(self) -> int:
        """The largest number of sequences that divides every batch."""
        return math.gcd(self.total, self.start, self.increment)

    def at(self, consumed: int) -> int:
        """The batch of the step after `consumed` samples."""
        if consumed >= self.samples:
            return self.total
        return self.start + consumed * self.levels // self.samples * self.increment

    def before_step(self, step: int) -> int:
        """The samples before a step, counted from 1."""
        return self.after_steps(0, step - 1)

    def after_steps(self, consumed: int, steps: int) -> int:
        """The samples after that many more steps."""
        left = steps
        while left and consumed < self.samples:
            size = self.at(consumed)
            level = (size - self.start) // self.increment
            end = min(-(-(level + 1) * self.samples // max(self.levels, 1)), self.samples)  # of this size
            same = min(left, -(-(end - consumed) // size))
            consumed, left = consumed + same * size, left - same
        return consumed + left * self.total


def batch_sizes(batch: BatchConfig, sites: int = 1) -> BatchSizes:
    """The batches of a run at all of its sites together, all equal without a ramp-up."""
    start, increment, samples = batch.rampup or (batch.total, batch.total, 0)
    return BatchSizes(sites * batch.total, sites * start, sites * increment, sites * samples)


def samples_of_run(batch: BatchConfig, train: TrainConfig) -> int:
    """The samples of all steps of a run."""
    return batch_sizes(batch).before_step(train.steps + 1)


def full_batch_steps(batch: BatchConfig, train: TrainConfig) -> int:
    """The steps of `batch.global` that have the samples of a run, rounded down. The learning rate counts in these, so
    that it is the same function of the samples with and without a ramp-up.
    """
    return samples_of_run(batch, train) // batch.total


def schedule_steps(batch: BatchConfig, train: TrainConfig, optimizer: OptimizerConfig) -> int:
    """The steps of `batch.global` of the learning rate's schedule."""
    return optimizer.schedule_steps or full_batch_steps(batch, train)
