"""Alerts for a loss or gradient norm far above its recent values."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from megascale.core.rank import Rank
from megascale.record.metrics import Alert
from megascale.train.spike import SpikeMonitor
from tests.runs import GPT, build_run, config_of, settings
from tests.worlds import run_world


def alerts(values: list[float], factor: float = 5.0, window: int = 10) -> list[Alert]:
    monitor = SpikeMonitor("loss", factor, window)
    return [alert for step, value in enumerate(values, 1) if (alert := monitor.add(step, value))]


def test_a_spike_is_one_alert() -> None:
    (alert,) = alerts([2.0, 2.2, 1.8, 2.1, 10.6, 11.0, 12.0, 2.0, 2.0])
    assert alert == Alert(5, "loss", 10.6, 2.05)
    assert str(alert) == "loss 10.6 is 5.17 times its recent median 2.05"
    assert [found.step for found in alerts([2.0, 2.0, 20.0, *[2.0] * 9, 20.0])] == [3, 13]
    assert [found.step for found in alerts([2.0, 2.0, 20.0, *[2.0] * 8, 20.0])] == [3], "once in a window"


def test_what_is_no_spike() -> None:
    draw = random.Random(1)
    assert alerts([draw.uniform(1, 4.9) for _ in range(500)]) == []
    assert alerts([1.0, 100.0]) == [], "two values are needed"
    assert alerts([11.0 * 0.99**step for step in range(300)]) == []
    assert alerts([0.0] * 10 + [1.0]) == [], "a factor of zero says nothing"
    level = alerts([1.0] * 20 + [9.0] * 40)
    assert [found.step for found in level] == [21], "a new level is one alert"


def spiking(rank: Rank, config: Any) -> None:
    """Train with a gradient that is large in step 6."""
    from megascale.train.loop import train
    from megascale.train.reporter import Reporter, open_writers

    run = build_run(rank, config)
    compute_clipping = run.optimizer.compute_clipping

    def scaled(sq_norm: Any, **totals: Any) -> Any:
        return compute_clipping(sq_norm * (1e4 if run.progress.step == 5 else 1.0), **totals)

    run.optimizer.compute_clipping = scaled
    config.folder.mkdir(parents=True)
    reporter = Reporter(
        config,
        run.device,
        None,
        open_writers(config.folder, config.train.steps, 0, tensorboard=config.observe.tensorboard),
        run.mesh.recorder,
    )
    assert train(run, reporter) == 0, "an alert is no reason to stop"
    reporter.close()


def test_a_run_writes_alerts_and_goes_on(tmp_path: Path) -> None:
    changes = {"fault__spike_window": 10, "train__steps": 7, "train__precision": "fp32"}
    config = config_of(settings(GPT | {"num_layers": 1}, tmp_path, **changes), tmp_path)
    run_world(1, spiking, config)
    records = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    (alert,) = [record for record in records if "alert" in record]
    assert (alert["step"], alert["alert"]) == (6, "grad_norm")
    assert 50 < alert["value"] / alert["recent"] < 200
    assert records[-1]["step"] == 7
