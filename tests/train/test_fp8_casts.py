"""A rise in saturation or underflow of FP8 casts causes a warning."""

from __future__ import annotations

import json
from pathlib import Path

from megascale.parallel.fp8_state import CastStats
from megascale.train.fp8_casts import WARM_UP_RECORDS, CastMonitor


def test_a_warning_names_the_tensor_and_its_usual_share() -> None:
    monitor, calm = CastMonitor(), {"a": CastStats(1.0, 0.0, 0.02), "b": CastStats(1.0, 0.0, 0.0)}
    for _ in range(WARM_UP_RECORDS + 1):
        assert not list(monitor.update(calm))
    (warning,) = monitor.update(calm | {"b": CastStats(9.0, 0.25, 0.0)})
    assert "saturate in fp8: b 25.0% (usually 0.0%)" in warning and "a " not in warning.split(":")[1]


def test_a_constant_share_is_no_rise() -> None:
    monitor = CastMonitor()
    for _ in range(20):
        assert not list(monitor.update({"a": CastStats(1.0, 0.2, 0.5)}))


def test_the_first_records_and_small_shares_cause_no_warning() -> None:
    monitor = CastMonitor()
    assert not list(monitor.update({"a": CastStats(1.0, 0.0, 0.0)}))
    assert not list(monitor.update({"a": CastStats(1.0, 0.5, 0.0)}))
    calm = CastMonitor()
    for _ in range(WARM_UP_RECORDS + 1):
        list(calm.update({"a": CastStats(1.0, 0.0, 0.0)}))
    assert not list(calm.update({"a": CastStats(1.0, 1e-4, 0.01)}))
    assert not list(calm.update({}))


def test_a_resumed_run_knows_the_usual_shares(tmp_path: Path) -> None:
    uninterrupted, resumed, fresh = CastMonitor(), CastMonitor(), CastMonitor()
    shares = [{"a": CastStats(1.0, 0.001 * step, 0.1), "b": CastStats(2.0, 0.0, 0.01 * step)} for step in range(6)]
    for stats in shares:
        list(uninterrupted.update(stats))
    lines = [
        json.dumps({"step": step, "fp8": {n: vars(s) for n, s in stats.items()}}) for step, stats in enumerate(shares)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:4], json.dumps({"step": 4, "valid_loss": 1.0}), ""]))
    resumed.load_history(tmp_path / "metrics.jsonl")
    for stats in shares[4:]:
        list(resumed.update(stats))
    burst = shares[-1] | {"a": CastStats(1.0, 0.5, 0.1)}
    assert list(uninterrupted.update(burst)) == list(resumed.update(burst)) != []
    assert list(fresh.update(burst)) == []
