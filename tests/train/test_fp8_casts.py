"""Unusual statistics of FP8 casts cause alerts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megascale.config.backends import Fp8Config
from megascale.parallel.fp8_state import CastStats
from megascale.record.metrics import Alert
from megascale.train.fp8_casts import WARM_UP, CastMonitor

CALM = CastStats(amax=1.0, saturated=0.0, underflow=0.02, rms=1.0, kurtosis=3.0)


def alerts(monitor: CastMonitor, step: int = 1, **stats: CastStats) -> list[Alert]:
    return list(monitor.update(step, stats))


def calmed(**stats: CastStats) -> CastMonitor:
    """A monitor after its warm-up."""
    monitor = CastMonitor()
    for _ in range(WARM_UP):
        assert not alerts(monitor, **stats)
    return monitor


def test_an_alert_names_the_worst_operand_and_its_usual_value() -> None:
    monitor = calmed(a=CALM, b=CALM, c=CALM)
    rise = {"a": CALM, "b": replace(CALM, saturated=0.25), "c": replace(CALM, saturated=0.5)}
    (alert,) = alerts(monitor, 7, **rise)
    assert alert == Alert(7, "share of saturated elements of c and 1 more", 0.5, 0.0)
    assert str(alert).endswith("c and 1 more 0.5 is above its recent median 0")
    assert not alerts(monitor, 8, **rise), "a rise is one alert"
    assert not alerts(monitor, 9, a=CALM, b=CALM, c=CALM)
    assert len(alerts(monitor, 10, **rise)) == 1, "after its end there may be another"


@pytest.mark.parametrize(("kind", "usual", "risen"), [("underflow", 0.02, 0.2), ("kurtosis", 5.0, 30.0)])
def test_a_rise_of_each_statistic(kind: str, usual: float, risen: float) -> None:
    monitor = calmed(a=replace(CALM, **{kind: usual}))
    (alert,) = alerts(monitor, a=replace(CALM, **{kind: risen}))
    assert kind in alert.alert and (alert.value, alert.recent) == (risen, usual)
    assert not alerts(calmed(a=replace(CALM, **{kind: risen})), a=replace(CALM, **{kind: risen})), (
        "a constant is no rise"
    )


def test_the_first_records_and_small_values_cause_no_alert() -> None:
    monitor = CastMonitor()
    assert not alerts(monitor, a=CALM) and not alerts(monitor, a=replace(CALM, saturated=0.5))
    assert not alerts(calmed(a=CALM), a=replace(CALM, saturated=1e-4, underflow=0.05, kurtosis=12.0))
    assert not alerts(calmed(a=CALM))


def test_static_scales_hold_within_a_factor_of_two() -> None:
    for rms, outside in ((0.51, False), (1.9, False), (0.4, True), (3.0, True), (0.0, True)):
        stats, monitor = replace(CALM, rms=rms), CastMonitor(static=True)
        found = [alert for step in range(2 * WARM_UP) for alert in alerts(monitor, step, a=stats)]
        assert [alert.step for alert in found] == [WARM_UP] * outside, rms
        assert all(alert.alert == "factor beyond 2 between RMS and static scale of a" for alert in found)
        assert not alerts(calmed(a=stats), a=stats), "other scales follow the RMS"


@pytest.mark.parametrize(("later", "limited"), [([], True), ([(0.5, "bf16")], True), ([(0.5, "mxfp8")], False)])
def test_an_rms_is_limited_where_every_phase_has_static_scales(later: list[tuple[float, str]], limited: bool) -> None:
    monitor = CastMonitor.of(Fp8Config(recipe="static", schedule=later))
    found = [alert for step in range(WARM_UP + 1) for alert in alerts(monitor, step, a=replace(CALM, rms=0.01))]
    assert bool(found) == limited


def test_a_resumed_run_knows_the_usual_values(tmp_path: Path) -> None:
    uninterrupted, resumed, fresh = CastMonitor(), CastMonitor(), CastMonitor()
    records = [
        {"a": replace(CALM, saturated=0.001 * step), "b": replace(CALM, kurtosis=3.0 + step)} for step in range(6)
    ]
    for step, stats in enumerate(records):
        alerts(uninterrupted, step, **stats)
    lines = [
        json.dumps({"step": step, "fp8": {n: vars(s) for n, s in stats.items()}}) for step, stats in enumerate(records)
    ]
    old = json.dumps({"step": 0, "fp8": {"a": {"amax": 1.0}}})
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join([old, *lines[:4], json.dumps({"step": 4, "valid_loss": 1.0}), ""])
    )
    resumed.load_history(tmp_path / "metrics.jsonl")
    for step, stats in enumerate(records[4:], 4):
        alerts(resumed, step, **stats)
    burst = records[-1] | {"a": replace(CALM, saturated=0.5)}
    assert alerts(uninterrupted, 6, **burst) == alerts(resumed, 6, **burst) != []
    assert alerts(fresh, 6, **burst) == []
