"""Repeated measurements in three numbers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale.device import Mark, Timer


@dataclass(frozen=True)
class Spread:
    """The median of `count` measurements, and the quartiles `low` and `high`."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Quartiles lie between measurements, as numpy's do by default. `values`: one or more."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))


def between(timer: Timer, marks: Sequence[Mark]) -> list[float]:
    """Seconds from each mark to the next. The device has passed them all."""
    moments = [timer.seconds(mark) for mark in marks]
    passed = [moment for moment in moments if moment is not None]
    assert len(passed) == len(marks), "the device is waited for before its marks are read"
    return [end - start for start, end in itertools.pairwise(passed)]
