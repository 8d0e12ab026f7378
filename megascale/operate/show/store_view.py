"""Analyses of a run's event store for the views: slowness by rank, heat map, findings, where the time went, memory,
loads of experts.

`read_store_view` computes them once; `store_follower` again and again, for a run that goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megascale.operate.diagnose.slow.cube_queries import recent_cube
from megascale.operate.diagnose.slow.expert_loads import ExpertLoads, recent_loads
from megascale.operate.diagnose.slow.finding import Finding
from megascale.operate.diagnose.slow.findings import MIN_CROWDED_SHARE, crowd_note, findings
from megascale.operate.diagnose.slow.heatmap import HeatMap, heat_map, slowness
from megascale.operate.diagnose.slow.host_outliers import HostComparison, recent_host_outliers
from megascale.operate.diagnose.slow.mfu_breakdown import MfuBreakdown
from megascale.operate.show.run_breakdown import BUBBLE_STEPS, run_breakdown
from megascale.operate.store.query import StoreError, fetch
from megascale.operate.store.reading import read_store

if TYPE_CHECKING:
    import duckdb

_LAST = "attempt = (SELECT max(attempt) FROM steps)"
_WORLD = f"""
    SELECT greatest(
        (SELECT max(greatest(world, rank + 1)) FROM ranks),
        (SELECT max(rank) + 1 FROM steps WHERE {_LAST})
    ) AS world"""
"""The number of ranks, in SQL: a damaged file of `ranks` may have the highest of them."""


@dataclass(frozen=True)
class StoreView:
    """Analyses of the store. `slowness` [ranks]: excess over the peers' compute time, such as 0.1; `memory` [ranks]:
    peak bytes of the device; both NaN for a rank without rows. `hosts`: by their metrics, None without any. `lost`:
    events that were overwritten before they were read. `notes`: what could not be read, or cannot be known. `crowded`:
    ranks share cores.
    """

    heat: HeatMap
    slowness: np.ndarray
    memory: np.ndarray
    nodes: tuple[str, ...]
    findings: tuple[Finding, ...]
    breakdown: MfuBreakdown | None
    experts: ExpertLoads
    hosts: HostComparison | None = None
    lost: int = 0
    notes: tuple[str, ...] = ()
    crowded: bool = False

    @property
    def marked(self) -> np.ndarray:
        """The slowness for which a rank is marked: NaN where ranks that share cores explain it."""
        return np.where(self.crowded & (self.slowness < MIN_CROWDED_SHARE), np.nan, self.slowness)

    @property
    def last_step(self) -> int:
        """The newest step that was analysed."""
        return self.heat.last_step

    @property
    def verdicts(self) -> list[str]:
        """The findings that are not over, in words."""
        return [str(finding) for finding in self.findings if finding.until is None]


def read_store_view(
    folder: Path, opened: Callable[[duckdb.DuckDBPyConnection], None] = lambda store: None
) -> StoreView | None:
    """Return the analyses of a run; None before its store has a step of a rank that it knows. `opened`: takes each
    connection, whose queries another thread may interrupt.

    Raises: StoreError
    """

    def read(store: duckdb.DuckDBPyConnection) -> StoreView | None:
        opened(store)
        return _analyse(store, folder)

    reading = read_store(folder, read)
    if reading.value is None and reading.notes:
        raise StoreError("; ".join(reading.notes))
    if reading.value is None:
        return None
    return replace(reading.value, notes=(*reading.notes, *reading.value.notes))


def _analyse(store: duckdb.DuckDBPyConnection, folder: Path) -> StoreView | None:
    cube = recent_cube(store, BUBBLE_STEPS)
    if not len(cube.steps) or not len(cube.places.rank):
        return None
    world = int(fetch(store, _WORLD)["world"][0])
    hosts = recent_host_outliers(store)
    memory = fetch(store, f"SELECT rank, max(peak_memory_bytes) AS bytes FROM steps WHERE {_LAST} GROUP BY rank")
    places, nodes = cube.places, [""] * world
    for rank, node in zip(places.rank.tolist(), places.node.tolist(), strict=True):
        nodes[rank] = places.nodes[node]
    return StoreView(
        heat_map(cube),
        _by_rank(world, places.rank, slowness(cube)),
        _by_rank(world, memory["rank"], memory["bytes"]),
        tuple(nodes),
        tuple(findings(store)),
        run_breakdown(store, folder, cube),
        recent_loads(store),
        hosts if hosts.hosts else None,
        int(fetch(store, "SELECT coalesce(sum(events_lost), 0) AS lost FROM steps")["lost"][0]),
        tuple(filter(None, (crowd_note(places),))),
        bool(places.crowded),
    )


def _by_rank(world: int, ranks: np.ndarray, values: np.ndarray) -> np.ndarray:
    found = np.full(world, np.nan)
    found[ranks] = values
    return found
