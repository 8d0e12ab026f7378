"""The law of the loss by the format of GEMMs (Sun et al. 2025): its least point, its figures, and where it holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.plan.search.precision_law import FORMATS, PrecisionLaw


@pytest.mark.parametrize(("name", "tokens"), [("e2m1", 0.39e12), ("e4m3", 27e12), ("e5m2", 19e12), ("bf16", 1730e12)])
def test_critical_tokens_of_a_billion_weights(name: str, tokens: float) -> None:
    """The figures of the paper's section 4.3 (0.4T, 27T and 1,730T), and e5m2 beside them."""
    assert PrecisionLaw(1e9, 1e11, 128).critical_tokens(*FORMATS[name]) == pytest.approx(tokens, rel=0.03)


@given(
    weights=st.floats(1e7, 1e12), block=st.integers(2, 10_000), bits=st.sampled_from(list(FORMATS.values())),
    share=st.floats(1e-3, 1e3),
)  # fmt: skip
def test_the_loss_is_least_at_the_critical_tokens(
    weights: float, block: int, bits: tuple[int, int], share: float
) -> None:
    """Its derivative has the sign of D - D_crit, and is zero there."""

    def loss(tokens: float) -> float:
        law = PrecisionLaw(weights, tokens, block)
        return law.plain_loss + law.added_loss(*bits)

    critical = PrecisionLaw(weights, 1e9, block).critical_tokens(*bits)
    slope = {at: (loss(at * 1.001) - loss(at * 0.999)) / 0.002 for at in (critical, critical * share)}
    terms = PrecisionLaw(weights, critical, block).added_loss(*bits)
    assert abs(slope[critical]) < 1e-4 * terms + 1e-11
    if abs(math.log(share)) > 0.1 and terms > 1e-6:
        assert math.copysign(1, slope[critical * share]) == math.copysign(1, share - 1)


def test_an_exponent_bit_is_worth_slightly_more_than_a_mantissa_bit() -> None:
    """The best split of 4, 8 and 16 bits is E2M1, E4M3 and E8M7 (the paper's figure 5)."""
    law = PrecisionLaw(1e9, 1e11, 128)
    for bits, best in ((4, (2, 1)), (8, (4, 3)), (16, (8, 7))):
        splits = [(exponent, bits - 1 - exponent) for exponent in range(1, bits)]
        assert min(splits, key=lambda split: law.added_loss(*split)) == best


def test_what_is_outside_of_the_fitted_runs_is_named() -> None:
    assert PrecisionLaw(41e6, 100e9, 32).outside == []
    assert PrecisionLaw(7e9, 1e12, 16).outside == ["7.00B weights", "1.00T tokens", "16 elements per scale"]
