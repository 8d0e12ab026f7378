"""Costs found by least squares: those that the samples were made of, and none below nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.bench.fit import Sample, costs, error

SIZES = [(1.0, 1e3, 1e6), (1.0, 1e6, 1e6), (1.0, 1e9, 1e7), (3.0, 1e9, 1e9), (2.0, 1e6, 1e9)]


def samples(*truth: float, known: float = 0.0) -> list[Sample]:
    said = [sum(cost * amount for cost, amount in zip(truth, each, strict=True)) for each in SIZES]
    return [Sample(each, (seconds + known,) * 3, known) for each, seconds in zip(SIZES, said, strict=True)]


@given(st.floats(1e-6, 1e-3), st.floats(1e-12, 1e-9), st.floats(1e-12, 1e-9), st.sampled_from([0.0, 1e-3]))
def test_what_samples_were_made_of_is_found(call: float, flop: float, byte: float, known: float) -> None:
    found = costs(samples(call, flop, byte, known=known))
    assert found == pytest.approx((call, flop, byte), rel=1e-3)
    assert error(samples(call, flop, byte, known=known), found) < 1e-6


def test_a_cost_is_never_negative() -> None:
    found = costs(samples(1e-5, 1e-10, -1e-14))
    assert found[2] == 0.0
    assert min(found) == 0.0
    assert found[1] == pytest.approx(1e-10, rel=0.05)


def test_a_sample_is_its_median_and_how_much_its_rounds_differ() -> None:
    sample = Sample((1.0,), (3.0, 1.0, 2.0))
    assert sample.median == 2.0
    assert sample.ratio == 3.0
    assert costs([sample]) == pytest.approx((2.0,))
