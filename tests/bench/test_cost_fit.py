"""Non-negative least squares: known costs are recovered, and no cost is negative."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.bench.cost_fit import Measurement, fit_costs, mean_relative_error

SIZES = [(1.0, 1e3, 1e6), (1.0, 1e6, 1e6), (1.0, 1e9, 1e7), (3.0, 1e9, 1e9), (2.0, 1e6, 1e9)]


def samples(*truth: float, known: float = 0.0) -> list[Measurement]:
    said = [sum(cost * amount for cost, amount in zip(truth, each, strict=True)) for each in SIZES]
    return [Measurement(each, (seconds + known,) * 3, known) for each, seconds in zip(SIZES, said, strict=True)]


@given(st.floats(1e-6, 1e-3), st.floats(1e-12, 1e-9), st.floats(1e-12, 1e-9), st.sampled_from([0.0, 1e-3]))
def test_known_costs_are_recovered(call: float, flop: float, byte: float, known: float) -> None:
    costs = fit_costs(samples(call, flop, byte, known=known))
    assert costs == pytest.approx((call, flop, byte), rel=1e-3)
    assert mean_relative_error(samples(call, flop, byte, known=known), costs) < 1e-6


def test_a_cost_is_never_negative() -> None:
    costs = fit_costs(samples(1e-5, 1e-10, -1e-14))
    assert costs[2] == 0.0
    assert min(costs) == 0.0
    assert costs[1] == pytest.approx(1e-10, rel=0.05)


def test_a_measurement_has_its_median_and_the_ratio_of_its_rounds() -> None:
    sample = Measurement((1.0,), (3.0, 1.0, 2.0))
    assert sample.median == 2.0
    assert sample.ratio == 3.0
    assert fit_costs([sample]) == pytest.approx((2.0,))
