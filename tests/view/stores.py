"""A run's folder with the event store of a synthetic job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megascale.bench.fleet import Fleet
from megascale.bench.fleet_tables import write_store
from megascale.bench.fleet_times import FleetFault, FleetLayout
from megascale.layout.topology import Topology
from tests.view.folders import make_run

SLOW = FleetFault("slow", rank=5, factor=1.2)


def make_stored_run(folder: Path, fault: FleetFault = SLOW, steps: int = 60, **overrides: Any) -> tuple[Path, Fleet]:
    """Write a run of eight ranks, tp 2, pp 2, dp 2, and return its folder and its fleet."""
    run = make_run(folder, steps=steps, total=2 * steps, parallel__dp=2, batch__global=16, **overrides)
    fleet = Fleet(FleetLayout(Topology(tp=2, pp=2, dp=2), steps=steps, node_ranks=4), fault=fault)
    write_store(fleet, run)
    return run, fleet
