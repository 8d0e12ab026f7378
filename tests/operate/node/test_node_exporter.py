"""The sampler of a launcher or collector: a sample that fails or hangs is said, and not served as if it were new."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from megascale.core.network import listen
from megascale.operate.health.host_metrics import HostMetrics
from megascale.operate.node import node_exporter
from megascale.operate.node.node_exporter import watching_host
from megascale.operate.store import metrics_server
from megascale.operate.store.collector import Collector
from megascale.operate.store.exporter import MetricsEndpoint


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MetricsEndpoint:
    monkeypatch.setattr(node_exporter, "METRICS_S", 0.02)
    monkeypatch.setattr(metrics_server, "FRESH_S", 0.0)
    with listen("127.0.0.1") as one:
        port = one.getsockname()[1]
    return MetricsEndpoint("127.0.0.1", port, "run", tmp_path, "host", "host")


def served(endpoint: MetricsEndpoint) -> str:
    ((address,),) = (one["targets"] for one in json.loads(endpoint.targets_file.read_text()))
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def test_a_sample_that_fails_is_said_once_and_the_next_is_served(
    endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    failures = iter(range(3))

    def sample(self: HostMetrics) -> dict[str, float]:
        if next(failures, None) is not None:
            raise OSError(5, "Input/output error")
        return {"cpu.load": 0.5}

    monkeypatch.setattr(HostMetrics, "sample", sample)
    with watching_host(Collector({}, print), endpoint, said.append):
        until(endpoint.targets_file.exists)
        until(lambda: 'megascale_host_load1{node="host",run="run"} 0.5' in served(endpoint))
    assert sum("no metrics of the host: OSError(5, 'Input/output error')" in line for line in said) == 1


def test_an_old_sample_is_not_served(endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second sample hangs, as on a dead disk."""
    monkeypatch.setattr(node_exporter, "STALE_S", 0.5)
    samples = iter([{"cpu.load": 0.5}])
    ended: list[bool] = []

    def sample(self: HostMetrics) -> dict[str, float]:
        if (first := next(samples, None)) is None:
            until(lambda: ended)
            return {}
        return first

    monkeypatch.setattr(HostMetrics, "sample", sample)
    with watching_host(Collector({}, print), endpoint, print):
        until(endpoint.targets_file.exists)
        until(lambda: "megascale_host_load1" not in served(endpoint))
        ended.append(True)
