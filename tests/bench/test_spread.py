"""Median and quartiles, and the seconds between marks."""

from __future__ import annotations

import numpy as np
import pytest

from megascale.bench.spread import Spread, between
from megascale.device import HostTimer, Mark


@pytest.mark.parametrize("count", [1, 2, 3, 4, 20, 21])
def test_as_numpy_has_it(count: int) -> None:
    values = np.random.default_rng(count).random(count)
    found = Spread.of(values.tolist())
    assert found.count == count
    assert (found.low, found.median, found.high) == pytest.approx(np.percentile(values, [25, 50, 75]))


def test_one_slow_step_moves_neither_median_nor_quartiles() -> None:
    steps = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
    assert Spread.of([*steps, 90.0]) == Spread.of([*steps, 2.0])


def test_seconds_between_marks() -> None:
    assert between(HostTimer(), [1.0, 3.0, 3.5]) == [2.0, 0.5]


def test_a_mark_that_was_not_waited_for_is_not_left_out() -> None:
    class Late(HostTimer):
        def seconds(self, mark: Mark) -> float | None:
            return None if mark == 3.0 else super().seconds(mark)

    with pytest.raises(AssertionError, match="waited for"):
        between(Late(), [1.0, 3.0, 3.5])
