"""A blend whose weights change at places in the order of samples (`data.weights`, `data.policy`), by arithmetic.

Every dataset goes on where it was: the number of a sample among those of its dataset counts the parts before it, too.
With `data.weights` nothing but the configuration and the place of a sample is needed, whenever and wherever a run
resumes; with a data policy the weights where it reads (`data.mixture_weights`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megascale.data.mix.blend import Blend

Part = tuple[int, Sequence[float]]
"""A place in the order of samples, and the weights from there on."""


def blend_parts(weights: Sequence[float], changes: Sequence[Part]) -> list[Part]:
    """The parts of the order: from 0 on the blend's own `weights`, unless the first of the changes is at 0."""
    return [*([] if changes and changes[0][0] == 0 else [(0, weights)]), *changes]


def same_order(parts: Sequence[Part], others: Sequence[Part], end: int, decomposed: bool = False) -> bool:
    """Return True if both have the same order of samples below `end`; further datasets of either have none there.

    Weights times a number may have another order, because sums of floating point numbers decide it. `decomposed`: the
    weights must be the same numbers, because those of buckets are made of them.
    """

    def facts(found: Sequence[Part]) -> list[Any]:
        weights = [(start, {number: weight for number, weight in enumerate(row) if weight}) for start, row in found]
        below = [(start, used) for start, used in weights if start < end]
        return below if decomposed else [(start, [*used], Blend([*used.values()]).nodes()) for start, used in below]

    return facts(parts) == facts(others)


@dataclass(frozen=True)
class _Part:
    """The order from `start` on: a blend of `datasets`, before which each dataset has had `before` samples."""

    start: int
    datasets: list[int]
    blend: Blend
    before: Sequence[int]

    def locate(self, index: int) -> tuple[int, int]:
        place, number = self.blend.locate(index - self.start)
        dataset = self.datasets[place]
        return dataset, number + self.before[dataset]

    def count(self, dataset: int, samples: int) -> int:
        own = dataset in self.datasets
        more = self.blend.count(self.datasets.index(dataset), max(samples - self.start, 0)) if own else 0
        return self.before[dataset] + more


class ChangingBlend:
    """The order of the samples of datasets whose weights (0 or above) change. `before`: samples that each dataset has
    had before the first part, if it does not start at 0; earlier samples are not known then.
    """

    def __init__(self, parts: Sequence[Part], before: Sequence[int] = ()) -> None:
        self._parts: list[_Part] = []
        for start, weights in parts:
            known = range(len(weights))
            counts = [self.count(dataset, start) for dataset in known] if self._parts else before or [0] * len(weights)
            used = [dataset for dataset in known if weights[dataset]]
            self._parts.append(_Part(start, used, Blend([weights[dataset] for dataset in used]), counts))

    def locate(self, index: int) -> tuple[int, int]:
        """The dataset of a sample, and the number of earlier samples of that dataset."""
        return self._at(index).locate(index)

    def count(self, dataset: int, samples: int) -> int:
        """Samples of a dataset among the first `samples`."""
        return self._at(max(samples - 1, self._parts[0].start)).count(dataset, samples)

    def _at(self, index: int) -> _Part:
        place = bisect_right(self._parts, index, key=lambda part: part.start) - 1
        assert place >= 0, f"samples before {self._parts[0].start} are not known, such as {index}"
        return self._parts[place]
