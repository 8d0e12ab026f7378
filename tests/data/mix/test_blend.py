"""The order of a blend: every dataset keeps to its share, and a sample's place needs no samples before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.data.mix.blend import MOST_AHEAD, Blend

WEIGHTS = st.lists(st.floats(2.0**-126, 2.0**127), min_size=1, max_size=8)


@given(WEIGHTS, st.integers(0, 10**12))
def test_a_sample_s_number_counts_the_samples_before_it(weights: list[float], start: int) -> None:
    blend = Blend(weights)
    counts = [blend.count(dataset, start) for dataset in range(len(weights))]
    assert sum(counts) == start
    for index in range(start, start + 50):
        dataset, number = blend.locate(index)
        assert number == counts[dataset]
        counts[dataset] += 1


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=40), st.integers(1, 10**6))
def test_no_dataset_is_far_from_its_share(weights: list[float], samples: int) -> None:
    blend = Blend(weights)
    for dataset, weight in enumerate(weights):
        share = samples * weight / sum(weights)
        assert blend.count(dataset, samples) == pytest.approx(share, abs=MOST_AHEAD + 1e-6)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([1], "0000"), ([1, 1], "0101"), ([3, 1], "00100010"), ([1, 1, 1, 1], "02130213"), ([1, 2], "101101101")],
)  # fmt: skip
def test_an_order_by_hand(weights: list[float], expected: str) -> None:
    blend = Blend(weights)
    found = [blend.locate(index)[0] for index in range(len(expected))]
    assert sorted(found) == sorted(map(int, expected))
    if weights == [1, 1]:
        assert found[:2] in ([0, 1], [1, 0])


def test_scaled_weights_give_the_same_order() -> None:
    one, other = Blend([0.7, 0.2, 0.1]), Blend([7 * 2.0**20, 2 * 2.0**20, 2.0**20])
    assert [one.locate(index) for index in range(500)] == [other.locate(index) for index in range(500)]


def test_a_tiny_weight_has_its_samples_late_but_has_them() -> None:
    blend = Blend([1.0, 2.0**-40])
    assert [blend.count(1, samples) for samples in (2**38, 2**41)] == [0, 2]
