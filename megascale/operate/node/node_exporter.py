"""Metrics of a host and of its ranks, sampled and served beside the ranks, whoever started them.

- `node_families`: all that a node's process exports
- `watching_host`: for a collector: samples the host for the event store, and exports

A node imports what it needs for that once its ranks have started.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.core.outages import Outages

if TYPE_CHECKING:
    from megascale.operate.store.collector import Collector
    from megascale.operate.store.exporter import MetricsEndpoint
    from megascale.operate.store.families import Labels, MetricFamily
    from megascale.operate.store.metrics_server import Say

METRICS_S = 5.0
"""Seconds between samples of the host's metrics, and seconds that a sample may take."""

STALE_S = 30.0
"""Age from which a sample is not served any more: a host whose disk is dead must not look as it did before."""


def node_families(collector: Collector | None, host: Mapping[str, float], labels: Labels) -> list[MetricFamily]:
    """Return the families of a node. `host`: the last sample of its metrics."""
    from megascale.operate.store.host_families import host_families
    from megascale.operate.store.rank_families import rank_families

    ranks = [] if collector is None else rank_families(collector, labels)
    return [*ranks, *host_families(host, labels)]


@contextlib.contextmanager
def watching_host(collector: Collector, endpoint: MetricsEndpoint, say: Say) -> Iterator[None]:
    """Sample the host's metrics for the event store during a `with` block, and serve them with those of the ranks."""
    from megascale.operate.store.exporter import exporting

    sampler = _Sampler(collector, endpoint.folder, say)
    with contextlib.suppress(RuntimeError):  # this process may have no thread left
        threading.Thread(target=sampler.run, name="host metrics", daemon=True).start()  # may wait for a dead disk
    labels = endpoint.labels
    with exporting(lambda: node_families(collector, sampler.fresh(), labels), endpoint, say):
        try:
            yield
        finally:
            sampler.ended.set()


class _Sampler:
    """Samples the host until `ended`."""

    def __init__(self, collector: Collector, folder: Path, say: Say) -> None:
        self._collector = collector
        self._folder = folder
        self._say = say
        self._last: Mapping[str, float] = {}
        self._sampled = time.monotonic()
        self.ended = threading.Event()

    def run(self) -> None:
        from megascale.operate.health.host_metrics import HostMetrics

        metrics, outages = HostMetrics(self._folder), Outages()
        while not self.ended.is_set():
            try:
                self._last, self._sampled = metrics.sample(), time.monotonic()
                self._collector.add_host_metrics(self._last)
                outages.ends("sample")
            except (OSError, RuntimeError, ValueError) as error:
                if outages.begins("sample"):
                    self._say(f"WARNING: no metrics of the host: {error!r}; tried again every {METRICS_S:g} s")
            self.ended.wait(METRICS_S)

    def fresh(self) -> Mapping[str, float]:
        """Return the last sample; an empty one if it is older than STALE_S."""
        return self._last if time.monotonic() - self._sampled < STALE_S else {}
