"""A run's folder with the event store of a synthetic job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lab.fleet import Fleet
from lab.fleet_tables import write_store
from lab.fleet_times import FleetFault, FleetLayout
from megascale.core.storage import Location
from megascale.layout.topology import Topology
from megascale.operate.store.table_files import TableFile, write_rows
from tests.operate.show.folders import make_run
from tests.operate.store.tables import rows

SLOW = FleetFault("slow", rank=5, factor=1.2)


def make_stored_run(folder: Path, fault: FleetFault = SLOW, steps: int = 60, **overrides: Any) -> tuple[Path, Fleet]:
    """Write a run of eight ranks, tp 2, pp 2, dp 2, and return its folder and its fleet."""
    run = make_run(folder, steps=steps, total=2 * steps, parallel__dp=2, batch__global=16, **overrides)
    fleet = Fleet(FleetLayout(Topology(tp=2, pp=2, dp=2), steps=steps, node_ranks=4), fault=fault)
    write_store(fleet, run)
    return run, fleet


def store_loads(run: Path, loads: np.ndarray, first_step: int = 1, attempt: int = 0) -> None:
    """Write the loads of experts [steps, layers, experts] in each tenth step."""
    step, layer, expert = (places.reshape(-1) for places in np.indices(loads.shape))
    columns = {"attempt": np.full(loads.size, attempt, np.int16), "step": (first_step + 10 * step).astype(np.int32)}
    columns |= {"layer": layer.astype(np.int16), "expert": expert.astype(np.int16), "load": loads.reshape(-1)}
    write_rows(Location(str(run / "events")), TableFile("expert_loads", "n0", attempt, 0, 1), columns)


def store_host_metrics(run: Path, hosts: int, low: int = -1, samples: int = 120) -> None:
    """Write metrics of hosts every five seconds, of which host `low` has half the power of the others."""
    random = np.random.default_rng(1)
    store = Location(str(run / "events"))
    time_ns = [10**18 + index * 5 * 10**9 for index in range(samples)] * 2
    metric = ["gpu0.power_w"] * samples + ["cpu.percent"] * samples
    for host in range(hosts):
        power = 600 * (0.5 if host == low else 1.0) + random.normal(0, 10, samples)
        value = [*power.tolist(), *random.normal(20, 2, samples).tolist()]
        columns = {"node": f"n{host}", "time_ns": time_ns, "metric": metric, "value": value}
        write_rows(store, TableFile("host_metrics", f"n{host}", 0, 1, 2), rows("host_metrics", 2 * samples, **columns))
