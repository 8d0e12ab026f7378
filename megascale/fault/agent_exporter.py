"""The exporter of an agent: metrics of its node and of its ranks for Prometheus, once the driver has said where."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from megascale.export.exporter import Endpoint, exporting
from megascale.export.families import Family
from megascale.export.host_families import host_families
from megascale.export.rank_families import rank_families, read_records
from megascale.fault.messages import Welcome
from megascale.fault.node_place import NodePlace


class AgentExporter:
    """Serves metrics from the first Welcome on that asks for it, in threads of its own. The functions are called there:
    `records` returns the paths of flight records by rank, `host` the last sample of the host's metrics, `lost_s` the
    seconds without a driver.
    """

    def __init__(
        self,
        place: NodePlace,
        records: Callable[[], Mapping[int, Path]],
        host: Callable[[], Mapping[str, float]],
        lost_s: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._place = place
        self._records = records
        self._host = host
        self._lost_s = lost_s
        self._say = say
        self._open = contextlib.ExitStack()
        self._endpoint: Endpoint | None = None

    def start(self, welcome: Welcome) -> None:
        """Begin to serve, if it has not begun."""
        if self._endpoint is not None or not welcome.metrics_port:
            return
        place, folder = self._place, Path(welcome.folder)
        self._endpoint = Endpoint(
            welcome.metrics_address, welcome.metrics_port, welcome.run, folder, place.node, place.address
        )
        self._open.enter_context(exporting(self._families, self._endpoint, self._say))

    def close(self) -> None:
        """Stop serving."""
        self._open.close()

    def _families(self) -> Iterable[Family]:
        return list(self._node_families())

    def _node_families(self) -> Iterator[Family]:
        assert self._endpoint is not None
        labels = self._endpoint.labels
        yield from rank_families(read_records(self._records()), labels)
        yield from host_families(self._host(), labels)
        text = "time without a driver; ranks train on meanwhile"
        yield Family("agent_driver_lost_seconds", "gauge", text, [(labels, self._lost_s())])
