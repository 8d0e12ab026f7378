"""A blend whose weights change at places in the order of samples (`data.weights`), by arithmetic.

Every dataset goes on where it was: the number of a sample among those of its dataset counts the parts before it, too.
Nothing but the configuration and the place of a sample is needed, whenever and wherever a run resumes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from megascale.data.blend import Blend

Part = tuple[int, Sequence[float]]
"""A place in the order of samples, and the weights from there on."""


def blend_parts(weights: Sequence[float], changes: Sequence[Part]) -> list[Part]:
    """The parts of the order: from 0 on the blend's own `weights`, unless the first of the changes is at 0."""
    return [*([] if changes and changes[0][0] == 0 else [(0, weights)]), *changes]


def same_order(parts: Sequence[Part], others: Sequence[Part], end: int) -> bool:
    """Return True if both have the same weights for the samples below `end`; further datasets of either have none."""

    def shares(found: Sequence[Part]) -> list[tuple[int, list[float]]]:
        return [(start, _shares(weights)) for start, weights in found if start < end]

    return shares(parts) == shares(others)


def _shares(weights: Sequence[float]) -> list[float]:
    total, used = sum(weights), list(weights)
    while not used[-1]:
        used.pop()
    return [round(weight / total, 12) for weight in used]


class ChangingBlend:
    """The order of the samples of datasets whose weights (0 or above) change."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._starts = [start for start, _ in parts]
        self._datasets = [[number for number, weight in enumerate(weights) if weight] for _, weights in parts]
        self._blends = [Blend([weight for weight in weights if weight]) for _, weights in parts]

    def locate(self, index: int) -> tuple[int, int]:
        """The dataset of a sample, and the number of earlier samples of that dataset."""
        part = bisect_right(self._starts, index) - 1
        place, number = self._blends[part].locate(index - self._starts[part])
        dataset = self._datasets[part][place]
        return dataset, number + self.count(dataset, self._starts[part])

    def count(self, dataset: int, samples: int) -> int:
        """Samples of a dataset among the first `samples`."""
        total = 0
        ends = [*self._starts[1:], samples]
        for start, end, datasets, blend in zip(self._starts, ends, self._datasets, self._blends, strict=True):
            if start < samples and dataset in datasets:
                total += blend.count(datasets.index(dataset), min(end, samples) - start)
        return total
