"""A rise of what casts lose is said once it is out of the ordinary."""

from __future__ import annotations

import json
from pathlib import Path

from megascale.parallel.eight_bit import Lost
from megascale.train.casts import FEW, CastMonitor


def test_a_rise_is_said_with_the_tensor_and_its_usual_share() -> None:
    monitor, calm = CastMonitor(), {"a": Lost(1.0, 0.0, 0.02), "b": Lost(1.0, 0.0, 0.0)}
    for _ in range(FEW + 1):
        assert not list(monitor.rises(calm))
    (warning,) = monitor.rises(calm | {"b": Lost(9.0, 0.25, 0.0)})
    assert "saturate in fp8: b 25.0% (usually 0.0%)" in warning and "a " not in warning.split(":")[1]


def test_what_is_usual_is_no_rise() -> None:
    monitor = CastMonitor()
    for _ in range(20):
        assert not list(monitor.rises({"a": Lost(1.0, 0.2, 0.5)}))


def test_the_first_records_and_small_shares_say_nothing() -> None:
    monitor = CastMonitor()
    assert not list(monitor.rises({"a": Lost(1.0, 0.0, 0.0)}))
    assert not list(monitor.rises({"a": Lost(1.0, 0.5, 0.0)}))
    calm = CastMonitor()
    for _ in range(FEW + 1):
        list(calm.rises({"a": Lost(1.0, 0.0, 0.0)}))
    assert not list(calm.rises({"a": Lost(1.0, 1e-4, 0.01)}))
    assert not list(calm.rises({}))


def test_what_is_usual_is_known_to_a_run_that_goes_on(tmp_path: Path) -> None:
    whole, resumed, fresh = CastMonitor(), CastMonitor(), CastMonitor()
    shares = [{"a": Lost(1.0, 0.001 * step, 0.1), "b": Lost(2.0, 0.0, 0.01 * step)} for step in range(6)]
    for lost in shares:
        list(whole.rises(lost))
    lines = [
        json.dumps({"step": step, "fp8": {n: vars(f) for n, f in lost.items()}}) for step, lost in enumerate(shares)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:4], json.dumps({"step": 4, "valid_loss": 1.0}), ""]))
    resumed.remember(tmp_path / "metrics.jsonl")
    for lost in shares[4:]:
        list(resumed.rises(lost))
    burst = shares[-1] | {"a": Lost(1.0, 0.5, 0.1)}
    assert list(whole.rises(burst)) == list(resumed.rises(burst)) != []
    assert list(fresh.rises(burst)) == []
