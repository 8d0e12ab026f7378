"""Data policies: what changes the weights of a blend's datasets during training (`data.blend_policy`). No torch.

DataPolicy, DataReport: the interface of a policy. MixtureWeights: the weights where a run reads, all that a reader of
samples has to know. The weights that a policy finds after a step begin `data.prefetch` + 2 steps later, with
the first step that no reader can have begun to read by then: every host reads the same samples, whatever reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megascale.config.batch_rampup import BatchSizes
from megascale.data.mix.blend import ChangingBlend, Part
from megascale.data.mix.skipped_ranges import Ranges, order_index

LIVE_PARTS = 2
"""Most parts of the order that a run reads or is about to read: with the present weights, and with the next."""

DIGITS = 6
"""Digits after the point of the shares of datasets: sums in another layout may differ in their last bits, and must not
change the order of samples.
"""


@dataclass(frozen=True)
class DataReport:
    """The datasets in the steps since the last update, up to `step`: shares of the samples (`weights`), mean losses per
    token (`losses`), NaN for a dataset without tokens and for a policy that uses no losses, and the number of `tokens`
    with a label in the loss; all [datasets], f64.
    """

    step: int
    weights: np.ndarray
    losses: np.ndarray
    tokens: np.ndarray


class DataPolicy(Protocol):
    """Built once with the configured weights [datasets] of `data.train`, which add up to 1. Rank 0 asks it; a run that
    resumes gives back `state`, so that all else must follow from its arguments.
    """

    state: np.ndarray
    """All that the policy remembers: f64, of a fixed length; saved in every checkpoint."""

    def __init__(self, weights: np.ndarray) -> None: ...

    def update(self, report: DataReport) -> np.ndarray:
        """Return new weights of the datasets, 0 or above, of any sum above 0."""


class Fixed:
    """Leaves the weights as they are: a run reads the samples that it reads without a policy."""

    def __init__(self, weights: np.ndarray) -> None:
        self.state = np.zeros(0)

    def update(self, report: DataReport) -> np.ndarray:
        return report.weights


@dataclass(frozen=True)
class MixtureWeights:
    """`parts`: (place in the order of samples, weights from there on), one or two. `before`: samples that each dataset
    has had before the first part.
    """

    parts: tuple[Part, ...]
    before: tuple[int, ...]

    @classmethod
    def first(cls, weights: Sequence[float]) -> MixtureWeights:
        return cls(((0, tuple(weights)),), (0,) * len(weights))

    @property
    def newest(self) -> Sequence[float]:
        return self.parts[-1][1]

    def blend(self) -> ChangingBlend:
        return ChangingBlend(self.parts, self.before)

    def are_read(self, place: int) -> bool:
        """Return True if a run that reads on at `place` has come to the last part. Another `data.blend_policy_every`
        than before could ask for an update earlier.
        """
        return place >= self.parts[-1][0]

    def changed(self, place: int, weights: Sequence[float]) -> MixtureWeights:
        """These weights, and others from `place` on. The run reads the last part already."""
        start, blend = self.parts[-1][0], self.blend()
        before = tuple(blend.count(dataset, start) for dataset in range(len(self.before)))
        return MixtureWeights((self.parts[-1], (place, tuple(weights))), before)

    def to_numbers(self) -> list[float]:
        """Return the weights as numbers, of which there are as many for every state of a mixture (`numbers`)."""
        starts = [float(start) for start, _ in self.parts]
        padded = [*self.parts, (0, [0.0] * len(self.before))][:LIVE_PARTS]
        return [
            *starts, *[-1.0] * (LIVE_PARTS - len(starts)), *map(float, self.before),
            *(float(weight) for _, weights in padded for weight in weights),
        ]  # fmt: skip

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> MixtureWeights:
        starts, rest = [int(start) for start in numbers[:LIVE_PARTS] if start >= 0], numbers[LIVE_PARTS:]
        count = len(rest) // (LIVE_PARTS + 1)
        before, *weights = (tuple(rest[count * part : count * (part + 1)]) for part in range(LIVE_PARTS + 1))
        return cls(tuple(zip(starts, weights, strict=False)), tuple(map(int, before)))


def numbers(datasets: int) -> int:
    """The numbers of the weights of a mixture of this many datasets."""
    return LIVE_PARTS + (LIVE_PARTS + 1) * datasets


def shares(weights: Sequence[float]) -> tuple[float, ...]:
    """The shares of datasets with these weights, rounded."""
    total = sum(weights)
    return tuple(round(weight / total, DIGITS) for weight in weights)


def next_place(sizes: BatchSizes, prefetch: int, skipped: Ranges, samples: int) -> int:
    """The place in the order of samples where weights begin to hold that are found after `samples` samples of the run.
    `sizes`: of its batches; `prefetch`: steps between a reader and the run; `skipped`: ranges not read by the run.
    """
    for _ in range(prefetch + 1):
        samples += sizes.at(samples)
    return order_index(samples, skipped)
