"""Comparison of nodes: no threshold in absolute units, a node is judged by the other nodes' values of the same check.

A value is low if it lies below the reference by more than `tolerance`, relatively, and by more than DEVIATIONS robust
standard deviations: 1.4826 x the median absolute deviation of the others, or the check's usual `noise` if that is more.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

MAD_TO_SIGMA = 1.4826  # standard deviation of a normal distribution, in median absolute deviations

DEVIATIONS = 5.0
"""Standard deviations beyond which a value is no noise: one false alarm in 3.5 million values that are normal."""

TOLERANCE = 0.3  # default share of the reference that a healthy node may lack
MOST_BOUND = 0.9  # share of the reference that no healthy node lacks, however much the others' values differ
MANY = 32  # nodes above which a node's own value does not change the median


@dataclass(frozen=True)
class Comparison:
    """A value beside the reference of the other values. `low`: too far below; `ratio`: value over reference."""

    value: float
    reference: float
    low: bool

    @property
    def ratio(self) -> float:
        return self.value / self.reference if self.reference else 1.0


def compare_high(values: Mapping[str, float], noise: float, tolerance: float = TOLERANCE) -> dict[str, Comparison]:
    """Compare every value, of which higher is better, with the median of the others. A single value has none."""
    if len(values) < 2:
        return {}
    of_all = _reference(list(values.values()), noise, tolerance)
    compared = {}
    for name, value in values.items():
        others = [other for key, other in values.items() if key != name] if len(values) <= MANY else []
        reference, bound = _reference(others, noise, tolerance) if others else of_all
        compared[name] = Comparison(value, reference, value < reference - bound)
    return compared


def _reference(values: Sequence[float], noise: float, tolerance: float) -> tuple[float, float]:
    """Return the median, and how far below a healthy value may lie."""
    reference = statistics.median(values)
    spread = max(MAD_TO_SIGMA * _mad(values, reference), noise * reference)
    return reference, min(max(tolerance * reference, DEVIATIONS * spread), MOST_BOUND * reference)


def compare_same(values: Mapping[str, float], floor: float) -> dict[str, Comparison]:
    """Compare every value with the median of all; `low` where it differs by more than `floor` and the spread."""
    if len(values) < 2:
        return {}
    reference = statistics.median(values.values())
    spread = MAD_TO_SIGMA * _mad(list(values.values()), reference)
    bound = max(floor, DEVIATIONS * spread)
    return {name: Comparison(value, reference, abs(value - reference) > bound) for name, value in values.items()}


def compare_links(
    rates: Mapping[tuple[str, str], float], noise: float, tolerance: float = TOLERANCE
) -> dict[tuple[str, str], Comparison]:
    """Compare the rates of links of one kind with their upper quartile: a bad node slows its partners' links, too. A
    single link has no reference.
    """
    if len(rates) < 2:
        return {}
    reference = statistics.quantiles(rates.values(), n=4, method="inclusive")[2]
    bound = max(tolerance, DEVIATIONS * noise) * reference
    return {pair: Comparison(rate, reference, rate < reference - bound) for pair, rate in rates.items()}


def compare_digests(digests: Mapping[str, str]) -> dict[str, Literal["ok", "differs", "undecided"]]:
    """Compare fingerprints of the same computation on nodes of the same kind: a minority is wrong. Without a majority,
    such as with two nodes, a difference has no culprit.
    """
    digest, count = Counter(digests.values()).most_common(1)[0]
    if 2 * count <= len(digests):
        return dict.fromkeys(digests, "undecided")
    return {node: "ok" if mine == digest else "differs" for node, mine in digests.items()}


def _mad(values: Sequence[float], center: float) -> float:
    return statistics.median(abs(value - center) for value in values)
