"""Metrics of a host and of its ranks, sampled and served beside the ranks, whoever started them.

- `node_families`: all that a node's process exports
- `watching_host`: for a launcher or collector: samples the host for the event store, and exports
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from megascale.eventstore.collector import Collector
from megascale.export.exporter import MetricsEndpoint, exporting
from megascale.export.families import Labels, MetricFamily
from megascale.export.host_families import host_families
from megascale.export.metrics_server import Say
from megascale.export.rank_families import rank_families
from megascale.fault.host_metrics import HostMetrics

METRICS_S = 5.0
"""Seconds between samples of the host's metrics, and seconds that a sample may take."""


def node_families(collector: Collector | None, host: Mapping[str, float], labels: Labels) -> list[MetricFamily]:
    """Return the families of a node. `host`: the last sample of its metrics."""
    ranks = [] if collector is None else rank_families(collector, labels)
    return [*ranks, *host_families(host, labels)]


@contextlib.contextmanager
def watching_host(collector: Collector, endpoint: MetricsEndpoint, say: Say) -> Iterator[None]:
    """Sample the host's metrics for the event store during a `with` block, and serve them with those of the ranks."""
    sampler = _Sampler(collector, endpoint.folder)
    threading.Thread(target=sampler.run, name="host metrics", daemon=True).start()  # may wait for a dead disk
    labels = endpoint.labels
    with exporting(lambda: node_families(collector, sampler.last, labels), endpoint, say):
        try:
            yield
        finally:
            sampler.ended.set()


class _Sampler:
    """Samples the host until `ended`. `last`: the last sample."""

    def __init__(self, collector: Collector, folder: Path) -> None:
        self._collector = collector
        self._folder = folder
        self.last: Mapping[str, float] = {}
        self.ended = threading.Event()

    def run(self) -> None:
        metrics = HostMetrics(self._folder)
        while not self.ended.wait(0 if not self.last else METRICS_S):
            self.last = metrics.sample()
            self._collector.add_host_metrics(self.last)
