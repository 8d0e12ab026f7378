"""Plans of the global batch: measured noise scales, and ramp-ups that follow a critical batch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.config.batch_rampup import BatchSizes
from megascale.core.errors import DataError
from megascale.plan.search.batch_plan import (
    CRITICAL_EXPONENT,
    MOST_LEVELS,
    NoiseCurve,
    cost,
    critical_by_law,
    fit_rampup,
    kaplan_critical,
    predicted_loss,
    read_measured,
    steps_of,
)


def test_costs_are_a_hyperbola() -> None:
    """(S / S_min - 1) (E / E_min - 1) = 1, and the critical batch doubles both."""
    assert cost(100, 100) == (2, 2)
    for batch in (1, 30, 100, 5000):
        steps, tokens = cost(batch, 100)
        assert (steps - 1) * (tokens - 1) == pytest.approx(1)


def test_the_critical_batch_of_kaplan_et_al() -> None:
    """A million tokens or two at the losses of large models (their section 5.1)."""
    assert kaplan_critical(1.0) == 2e8
    assert 1e6 < kaplan_critical(2.8) < 2e6


def test_the_predicted_loss_is_that_of_chinchilla() -> None:
    """70B parameters, 1.4T tokens: 1.936 by the formula; more tokens lower it."""
    assert predicted_loss(70e9, 1.4e12) == pytest.approx(1.936, abs=0.002)
    assert predicted_loss(70e9, 1.4e12) < predicted_loss(70e9, 1e11)


def test_noise_scales_are_interpolated_and_go_on_by_the_law() -> None:
    measured = NoiseCurve([100.0, 200.0, 400.0], [10.0, 30.0, 40.0])
    found = [measured.critical(tokens) for tokens in (0, 100, 150, 200, 300, 400, 4000)]
    assert found == pytest.approx([10, 10, 20, 30, 35, 40, 40 * 10**CRITICAL_EXPONENT])


def test_noise_scales_of_a_metrics_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [
        {"step": 1, "loss": 5.0, "loss_tokens": 100},
        {"step": 2, "loss": 4.0, "loss_tokens": 200, "noise_scale": 7.5},
        {"step": 2, "valid_loss": 4.0, "valid_tokens": 9},
        {"step": 3, "loss": 3.0, "loss_tokens": 300, "noise_scale": 9.5},
    ]
    path.write_text("\n".join(map(json.dumps, records)) + '\n{"step": 4, "loss"')
    assert read_measured(path) == NoiseCurve([200.0, 300.0], [7.5, 9.5])
    path.write_text(json.dumps(records[0]) + "\n")
    with pytest.raises(DataError, match="has no noise_scale"):
        read_measured(path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_measured(tmp_path / "absent")


def test_the_law_takes_the_given_loss_at_the_end() -> None:
    critical = critical_by_law(1e9, 1e10, loss=3.0)
    assert critical(1e10) == kaplan_critical(3.0) != critical(0.99e10)
    assert critical(1e9) == kaplan_critical(predicted_loss(1e9, 1e9)) < critical(9e9)
    assert critical_by_law(1e9, 1e10)(2e10) == kaplan_critical(predicted_loss(1e9, 1e10))


@given(st.integers(1, 64), st.floats(1, 5000), st.floats(0, 1), st.floats(1e4, 1e9))
def test_a_ramp_up_is_legal_and_at_most_critical_at_the_end(
    unit: int, sequences: float, exponent: float, samples: float
) -> None:
    """The rules of `batch.rampup`: whole increments up to the global batch, and micro x dp divides each."""
    tokens = samples * 16

    def critical(seen: float) -> float:
        return sequences * 16 * (seen / tokens) ** exponent

    sizes = fit_rampup(critical, tokens, 16, unit)
    assert sizes.total % unit == sizes.start % unit == sizes.increment % unit == 0
    assert sizes.total <= max(unit, sequences)
    if sizes.samples:
        assert sizes.start < sizes.total and (sizes.total - sizes.start) % sizes.increment == 0
        assert sizes.levels <= MOST_LEVELS and sizes.samples <= math.ceil(samples)
    else:
        assert sizes.start == sizes.total


def test_a_growing_critical_batch_is_followed_and_a_constant_one_is_not_ramped() -> None:
    samples = 1_000_000
    sizes = fit_rampup(lambda seen: max(16.0, 1000 * seen / samples), samples, 1, 8)
    assert sizes.samples == samples
    assert [sizes.at(consumed) for consumed in (100_000, 500_000, 900_000)] == pytest.approx([100, 500, 900], abs=100)
    assert fit_rampup(lambda seen: 1000.0, samples, 1, 8) == BatchSizes(1000, 1000, 1000, 0)


def test_steps_read_all_samples() -> None:
    for sizes in (BatchSizes(8, 2, 2, 12), BatchSizes(8, 8, 8, 0)):
        for samples in (1, 2, 12, 13, 100):
            steps = steps_of(sizes, samples)
            assert sizes.before_step(steps) < samples <= sizes.before_step(steps + 1)
