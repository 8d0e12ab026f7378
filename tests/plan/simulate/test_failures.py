"""Losses to failures: the checkpoint interval is a minimum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.plan.simulate.failures import failure_cost


@given(st.integers(1, 20_000), st.floats(1e4, 1e6), st.floats(0.1, 100))
def test_no_other_checkpoint_interval_loses_less(devices: int, hours: float, save_s: float) -> None:
    lost = failure_cost(devices, hours, save_s, 0.0)
    assert lost.mean_s == pytest.approx(hours * 3600 / devices)
    for factor in (0.5, 0.9, 1.1, 2.0):
        every = factor * lost.every_s
        assert lost.lost_share <= min(1.0, save_s / every + every / 2 / lost.mean_s) + 1e-12


def test_a_job_without_progress_never_ends() -> None:
    lost = failure_cost(10**6, 1.0, 60.0, 900.0)
    assert lost.lost_share == 1.0
    assert lost.with_failures(1.0) == float("inf")
