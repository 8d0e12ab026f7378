"""Learning rate schedules against their formulas, and properties of all schedules."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.catalog.decays import DECAYS
from megascale.config.batch_rampup import BatchSizes
from megascale.config.train import OptimizerConfig
from megascale.optim.lr import learning_rate

LR, MIN_LR = 3e-4, 2e-5

DECAY = st.sampled_from(DECAYS.names())
FALLING = st.sampled_from([name for name in DECAYS.names() if name != "constant"])


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int | None]:
    """Draw steps, warm-up and decay_steps that the configuration permits."""
    steps = draw(st.integers(1, 400))
    warmup = draw(st.integers(0, steps - 1))
    return steps, warmup, draw(st.none() | st.integers(1, steps - warmup))


def course(decay: str, run: tuple[int, int, int | None], **more: Any) -> list[float]:
    """List the learning rate by step; [0] is step 1."""
    steps, warmup, decay_steps = run
    keys = {"lr": LR, "min_lr": MIN_LR, "warmup_steps": warmup, "decay": decay, "decay_steps": decay_steps} | more
    at = learning_rate(OptimizerConfig(**keys), steps)
    return [at(step) for step in range(1, steps + 1)]


@given(DECAY, runs(), st.integers(1, 9))
def test_a_ramp_up_is_the_same_function_of_the_samples(decay: str, run: Any, unit: int) -> None:
    """Where the samples are those of whole batches, so is the rate; without growth everywhere."""
    steps, warmup, decay_steps = run
    keys = {"lr": LR, "min_lr": MIN_LR, "warmup_steps": warmup, "decay": decay, "decay_steps": decay_steps}
    config = OptimizerConfig(**keys)
    plain = learning_rate(config, steps, BatchSizes(unit, unit, 1, 0))
    assert [plain(step) for step in range(1, steps + 1)] == pytest.approx(course(decay, run), rel=1e-12)
    sizes = BatchSizes(2 * unit, unit, unit, 2 * unit)  # the first two steps have half a batch
    grown = learning_rate(config, steps + 1, sizes)
    assert [grown(step + 1) for step in range(1, steps + 1)] == pytest.approx(course(decay, run), rel=1e-12)


@given(DECAY, runs())
def test_warmup_is_linear_from_zero_to_lr(decay: str, run: Any) -> None:
    warmup = run[1]
    expected = [LR * step / warmup for step in range(1, warmup + 1)]
    assert course(decay, run)[:warmup] == pytest.approx(expected)


@given(DECAY, runs())
def test_the_rate_never_rises_after_warmup_and_stays_in_bounds(decay: str, run: Any) -> None:
    after = course(decay, run)[run[1] :]
    assert all(earlier >= later for earlier, later in pairwise(after))
    assert all(MIN_LR * (1 - 1e-12) <= rate <= LR for rate in after)


@given(FALLING, runs())
def test_a_decay_reaches_min_lr_one_step_after_the_last(decay: str, run: Any) -> None:
    steps, warmup, decay_steps = run
    keys = {"lr": LR, "min_lr": MIN_LR, "warmup_steps": warmup, "decay": decay, "decay_steps": decay_steps}
    at = learning_rate(OptimizerConfig(**keys), steps)
    assert at(steps + 1) == pytest.approx(MIN_LR)
    assert at(steps) > MIN_LR


@given(DECAY, runs())
def test_the_rate_is_continuous(decay: str, run: Any) -> None:
    """No step changes the rate by more than the steepest slope of warm-up or decay."""
    steps, warmup, decay_steps = run
    fall = min(decay_steps or max(steps // 10, 1), steps - warmup) if decay == "wsd" else steps + 1 - warmup
    steepest = max(LR / max(warmup, 1), (LR - MIN_LR) * (math.pi / 2 if decay == "cosine" else 1) / fall)
    rates = [0.0 if warmup else LR, *course(decay, run)]
    assert all(abs(b - a) <= steepest * (1 + 1e-9) for a, b in pairwise(rates))


@given(runs())
def test_constant(run: Any) -> None:
    assert set(course("constant", run)[run[1] :]) == {LR}


@given(runs())
def test_linear(run: Any) -> None:
    steps, warmup, _ = run
    expected = [LR + (MIN_LR - LR) * (step - warmup) / (steps + 1 - warmup) for step in range(warmup + 1, steps + 1)]
    assert course("linear", run)[warmup:] == pytest.approx(expected)


@given(runs())
def test_cosine(run: Any) -> None:
    steps, warmup, _ = run
    angles = [math.pi * (step - warmup) / (steps + 1 - warmup) for step in range(warmup + 1, steps + 1)]
    expected = [MIN_LR + (LR - MIN_LR) * (1 + math.cos(angle)) / 2 for angle in angles]
    assert course("cosine", run)[warmup:] == pytest.approx(expected)


@given(runs())
def test_wsd_stays_at_lr_and_decays_over_the_last_decay_steps(run: Any) -> None:
    steps, warmup, decay_steps = run
    fall = min(decay_steps or max(steps // 10, 1), steps - warmup)
    rates = course("wsd", run)
    assert set(rates[warmup : steps - fall]) <= {LR}
    expected = [MIN_LR + (LR - MIN_LR) * (fall - done) / (fall + 1) for done in range(fall)]
    assert rates[steps - fall :] == pytest.approx(expected)


def test_wsd_decays_over_a_tenth_of_the_steps_by_default() -> None:
    rates = course("wsd", (200, 10, None))
    assert rates[179] == LR > rates[180]
    assert rates[10:] == course("wsd", (200, 10, 20))[10:]


def test_only_wsd_reads_decay_steps() -> None:
    for decay in DECAYS.names():
        same = course(decay, (100, 10, 5)) == course(decay, (100, 10, 50))
        assert same is (decay != "wsd")


def test_a_run_of_one_step_trains() -> None:
    assert course("constant", (1, 0, None)) == [LR]
    assert course("cosine", (1, 0, None)) == [(LR + MIN_LR) / 2]


@given(DECAY, runs(), st.integers(1, 400))
def test_a_schedule_of_its_own_length(decay: str, run: Any, steps: int) -> None:
    """A run of any length has the rates of the schedule, and min_lr behind it; with a ramp-up, too."""
    length, warmup, decay_steps = run
    keys = {"lr": LR, "min_lr": MIN_LR, "warmup_steps": warmup, "decay": decay, "decay_steps": decay_steps}
    config = OptimizerConfig(schedule_steps=length, **keys)
    after = LR if decay == "constant" else MIN_LR
    expected = [*course(decay, run), *[after] * max(0, steps - length)][:steps]
    for sizes in (None, BatchSizes(3, 3, 1, 0)):
        at = learning_rate(config, steps, sizes)
        assert [at(step) for step in range(1, steps + 1)] == pytest.approx(expected, rel=1e-12)
