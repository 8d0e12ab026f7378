"""The exporter of an agent: metrics of its node and of its ranks for Prometheus, once the driver has said where.

What it needs is imported once ranks have started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.operate.channel.messages import Welcome
from megascale.operate.node.ranks import NodePlace

if TYPE_CHECKING:
    from megascale.operate.store.collector import Collector
    from megascale.operate.store.exporter import MetricsEndpoint
    from megascale.operate.store.families import MetricFamily
    from megascale.operate.store.metrics_server import Say

DRIVER_LOST = "time without a driver; ranks train on meanwhile"


class AgentExporter:
    """Serves metrics from the first Welcome on that asks for it, in threads of its own, which read what the agent sets:
    `collector` of the present ranks, and `host`, the last sample of the host's metrics, empty when that is old: a dead
    host must not look as it did before. `lost_s` returns the seconds without a driver.
    """

    def __init__(self, place: NodePlace, lost_s: Callable[[], float], say: Say) -> None:
        self.collector: Collector | None = None
        self.host: Mapping[str, float] = {}
        self._place = place
        self._lost_s = lost_s
        self._say = say
        self._open = contextlib.ExitStack()
        self._endpoint: MetricsEndpoint | None = None

    def start(self, welcome: Welcome) -> None:
        """Begin to serve, if it has not begun."""
        if self._endpoint is not None or not welcome.metrics_port:
            return
        from megascale.operate.store.exporter import MetricsEndpoint, exporting

        place, host, port = self._place, welcome.metrics_address, welcome.metrics_port
        self._endpoint = MetricsEndpoint(host, port, welcome.run, Path(welcome.folder), place.node, place.address)
        self._open.enter_context(exporting(self._families, self._endpoint, self._say))

    def close(self) -> None:
        """Stop serving."""
        self._open.close()

    def _families(self) -> list[MetricFamily]:
        from megascale.operate.store.families import MetricFamily
        from megascale.operate.store.host_families import host_families
        from megascale.operate.store.rank_families import rank_families

        assert self._endpoint is not None
        labels = self._endpoint.labels
        ranks = [] if self.collector is None else rank_families(self.collector, labels)
        lost = MetricFamily("agent_driver_lost_seconds", "gauge", DRIVER_LOST, [(labels, self._lost_s())])
        return [*ranks, *host_families(self.host, labels), *([] if self._place.alone else [lost])]
