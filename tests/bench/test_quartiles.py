"""Median and quartiles, and the seconds between marks."""

from __future__ import annotations

import numpy as np
import pytest

from megascale.bench.quartiles import Quartiles, intervals
from megascale.device import Mark
from megascale.record.recorder import HostTimer


@pytest.mark.parametrize("count", [1, 2, 3, 4, 20, 21])
def test_quartiles_equal_numpys(count: int) -> None:
    values = np.random.default_rng(count).random(count)
    found = Quartiles.from_values(values.tolist())
    assert found.count == count
    assert (found.low, found.median, found.high) == pytest.approx(np.percentile(values, [25, 50, 75]))


def test_one_slow_step_moves_neither_median_nor_quartiles() -> None:
    steps = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
    assert Quartiles.from_values([*steps, 90.0]) == Quartiles.from_values([*steps, 2.0])


def test_seconds_between_marks() -> None:
    assert intervals(HostTimer(), [1.0, 3.0, 3.5]) == [2.0, 0.5]


def test_a_mark_that_the_device_has_not_passed_is_an_error() -> None:
    class Late(HostTimer):
        def seconds(self, mark: Mark) -> float | None:
            return None if mark == 3.0 else super().seconds(mark)

    with pytest.raises(AssertionError, match="synchronize the device"):
        intervals(Late(), [1.0, 3.0, 3.5])
