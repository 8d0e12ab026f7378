"""The order of a blend: which dataset a sample comes from, by arithmetic.

A binary tree divides the datasets into halves of about equal weight. Among the first n samples of a node, round(n x
share) belong to its left half, the others to the right half. Every sample therefore has its dataset, and its number
among the samples of that dataset, without an index and without the samples before it.

The rounding of a node is at most half a sample, of which a dataset below gets its share. As weights at least halve over
two nodes, a dataset is at no point of the order more than MOST_AHEAD samples ahead of or behind its share.

Weights may change at places in the order (`data.blend_schedule`, `data.blend_policy`: `ChangingBlend`). Every dataset
goes on where it was: the number of a sample among those of its dataset counts the parts before it, too. With
`data.blend_schedule` nothing but the configuration and the place of a sample is needed, whenever and wherever a run
resumes; with a data policy the weights where it reads (`data_policy`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import fsum
from typing import Any, Protocol

SHARE_BITS = 60  # shares are multiples of 2^-60: sums of floating point numbers would depend on the place in the order


MOST_AHEAD = 2  # samples that a dataset is ahead of or behind its share, at most


class SampleOrder(Protocol):
    """Numbered sources (datasets, or buckets of datasets), one for each place in an order."""

    def locate(self, index: int) -> tuple[int, int]:
        """The source of a place, and the number of earlier places of that source."""

    def count(self, dataset: int, samples: int) -> int:
        """Places of a source among the first `samples`."""


class Blend:
    """The order of the samples of datasets with these weights (above 0)."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = list(weights)
        self._nodes: dict[tuple[int, int], tuple[int, int]] = {}

    def locate(self, index: int) -> tuple[int, int]:
        first, last = 0, len(self._weights)
        while last - first > 1:
            middle, share = self._node(first, last)
            before, after = _scaled(index, share), _scaled(index + 1, share)
            if after > before:
                last, index = middle, before
            else:
                first, index = middle, index - before
        return first, index

    def count(self, dataset: int, samples: int) -> int:
        first, last = 0, len(self._weights)
        while last - first > 1:
            middle, share = self._node(first, last)
            left = _scaled(samples, share)
            if dataset < middle:
                last, samples = middle, left
            else:
                first, samples = middle, samples - left
        return samples

    def nodes(self) -> list[tuple[int, int]]:
        """The nodes of the tree, from its root on, as `_node` returns them. The order is a function of them."""
        found, ranges = [], [(0, len(self._weights))]
        while ranges:
            first, last = ranges.pop()
            if last - first > 1:
                middle, share = self._node(first, last)
                found.append((middle, share))
                ranges += [(first, middle), (middle, last)]
        return found

    def _node(self, first: int, last: int) -> tuple[int, int]:
        """The first dataset of the right half of datasets [first, last), and the share of the left half."""
        if (first, last) not in self._nodes:
            weights = self._weights[first:last]
            total = fsum(weights)
            sums = list(accumulate(weights[:-1]))
            count = 1 + min(range(len(sums)), key=lambda number: abs(sums[number] - total / 2))
            share = round(fsum(weights[:count]) / total * 2**SHARE_BITS)
            self._nodes[first, last] = first + count, min(max(share, 1), 2**SHARE_BITS - 1)
        return self._nodes[first, last]


def _scaled(count: int, share: int) -> int:
    """`count` x `share` / 2^SHARE_BITS, rounded."""
    return (count * share + (1 << (SHARE_BITS - 1))) >> SHARE_BITS


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
        return self._at(index).locate(index)

    def count(self, dataset: int, samples: int) -> int:
        return self._at(max(samples - 1, self._parts[0].start)).count(dataset, samples)

    def _at(self, index: int) -> _Part:
        place = bisect_right(self._parts, index, key=lambda part: part.start) - 1
        assert place >= 0, f"samples before {self._parts[0].start} are not known, such as {index}"
        return self._parts[place]
