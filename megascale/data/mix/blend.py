"""The order of a blend: which dataset a sample comes from, by arithmetic.

A binary tree divides the datasets into halves of about equal weight. Among the first n samples of a node, round(n x
share) belong to its left half, the others to the right half. Every sample therefore has its dataset, and its number
among the samples of that dataset, without an index and without the samples before it.

The rounding of a node is at most half a sample, of which a dataset below gets its share. As weights at least halve over
two nodes, a dataset is at no point of the order more than MOST_AHEAD samples ahead of or behind its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import fsum

SHARE_BITS = 60
"""Shares are multiples of 2^-60: sums of floating point numbers would depend on the place in the order."""


MOST_AHEAD = 2
"""Samples that a dataset is ahead of or behind its share, at most."""


class Blend:
    """The order of the samples of datasets with these weights (above 0)."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = list(weights)
        self._nodes: dict[tuple[int, int], tuple[int, int]] = {}

    def locate(self, index: int) -> tuple[int, int]:
        """The dataset of a sample, and the number of earlier samples of that dataset."""
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
        """Samples of a dataset among the first `samples` of the blend."""
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
