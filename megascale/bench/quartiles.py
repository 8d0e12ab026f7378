"""Median and quartiles of repeated measurements."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale.device import Mark
    from megascale.record.recorder import Timer


@dataclass(frozen=True)
class Quartiles:
    """Median of `count` measurements, with the quartiles `low` and `high`."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Quartiles:
        """Compute quartiles of one or more values, interpolated as numpy does by default."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))


def intervals(timer: Timer, marks: Sequence[Mark]) -> list[float]:
    """Return the seconds between successive marks, all of which the device has passed."""
    moments = [timer.seconds(mark) for mark in marks]
    passed = [moment for moment in moments if moment is not None]
    assert len(passed) == len(marks), "synchronize the device before reading its marks"
    return [end - start for start, end in itertools.pairwise(passed)]
