"""The exporter of a process: its server of metrics, and the file by which Prometheus finds it.

The file is RUN/prometheus/NAME.json, in the form of Prometheus' `file_sd_configs`. A process that ends in order removes
its file; one that was killed leaves it, and Prometheus says that the target is down.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megascale.core.files import write_text
from megascale.operate.store.families import Labels, MetricFamily, exposition
from megascale.operate.store.metrics_server import MetricsServer, Say

TARGETS = "prometheus"  # folder of the targets' files, in the run's folder
DRIVER = "driver"  # name of the driver, which has no node, in the label `node`
CLOSE_S = 1.0  # seconds that the end of a process waits for a file server

_WILDCARDS = ("0.0.0.0", "::", "")


@dataclass(frozen=True)
class MetricsEndpoint:
    """Where a process serves metrics. `host`, `port`: as `observe.metrics_address` and `observe.metrics_port`, 0 for
    none. `run`, `folder`: of the run. `name`: of the process in the run, such as its node; `reach`: the host's name for
    others, if it listens on all interfaces.
    """

    host: str
    port: int
    run: str
    folder: Path
    name: str
    reach: str

    @property
    def labels(self) -> Labels:
        """The labels of all series."""
        return {"run": self.run, "node": self.name}

    def address(self, port: int) -> str:
        """Return host:port for Prometheus."""
        host = self.reach if self.host in _WILDCARDS else self.host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def targets_file(self) -> Path:
        """The file by which Prometheus finds this process."""
        name = "".join(char if char.isalnum() or char in "-_." else "_" for char in self.name)
        return self.folder / TARGETS / f"{name}.json"


@contextlib.contextmanager
def exporting(
    families: Callable[[], Iterable[MetricFamily]], endpoint: MetricsEndpoint, say: Say
) -> Iterator[str | None]:
    """Serve families during a `with` block, and yield the address; None if the endpoint has no port, or none is free,
    about which `say` is told.
    """
    if not endpoint.port:
        yield None
        return
    try:
        server = MetricsServer(lambda: exposition(families()), endpoint.host, endpoint.port, say)
        address = endpoint.address(server.port)
        thread = threading.Thread(target=_serve, args=(server, endpoint, address, say), name="metrics", daemon=True)
        thread.start()
    except (OSError, RuntimeError) as error:  # no port, or no thread
        where = f" at {endpoint.host}:{endpoint.port}" if isinstance(error, OSError) else ""
        say(f"WARNING: no metrics{where}: {getattr(error, 'strerror', None) or error}")
        yield None
        return
    try:
        yield address
    finally:
        server.close()
        thread.join(CLOSE_S)


def _serve(server: MetricsServer, endpoint: MetricsEndpoint, address: str, say: Say) -> None:
    """Serve, between the writing and the removal of the targets' file: a dead file server holds up this thread only."""
    exposition(())  # imports the library
    path = endpoint.targets_file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps([{"targets": [address], "labels": {"run": endpoint.run}}]) + "\n")
        say(f"metrics at http://{address}/metrics")
    except OSError as error:
        say(f"WARNING: metrics at http://{address}/metrics, but not in {path}: {error.strerror or error}")
    server.run()
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
