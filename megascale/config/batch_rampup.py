"""The global batch of each step, which grows during the ramp-up of `batch.rampup`, as in Megatron-LM.

The batch begins with `start` sequences and grows by `increment` to `batch.global`, at equal distances of samples over
the first `samples` of the run. It is a function of the samples before a step alone, so that a resume goes on exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


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


def batch_sizes(config: Any) -> BatchSizes:
    """The batches of a run with this section `batch`, all equal without a ramp-up."""
    start, increment, samples = config.batch.rampup or (config.batch.total, config.batch.total, 0)
    return BatchSizes(config.batch.total, start, increment, samples)


def samples_of_run(config: Any) -> int:
    """The samples of all steps of a run with these sections `batch` and `train`."""
    samples: int = batch_sizes(config).before_step(config.train.steps + 1)
    return samples


def full_batch_steps(config: Any) -> int:
    """The steps of `batch.global` that have the samples of a run, rounded down. The learning rate counts in these, so
    that it is the same function of the samples with and without a ramp-up.
    """
    return samples_of_run(config) // int(config.batch.total)
