"""Analyses of a run's event store for the views: slowness by rank, heat map, findings, where the time went, memory.

`read_store_view` computes them once; `StoreFollower` again and again in a thread, for a run that goes on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megascale.core.errors import MegascaleError
from megascale.core.units import format_duration
from megascale.operate.diagnose.slow.cube_queries import recent_cube
from megascale.operate.diagnose.slow.finding import Finding
from megascale.operate.diagnose.slow.findings import crowd_note, findings
from megascale.operate.diagnose.slow.heatmap import HeatMap, heat_map
from megascale.operate.diagnose.slow.host_outliers import HostComparison, recent_host_outliers
from megascale.operate.diagnose.slow.mfu_breakdown import MfuBreakdown
from megascale.operate.diagnose.slow.peers import compare
from megascale.operate.diagnose.slow.step_cube import StepCube
from megascale.operate.show.run_breakdown import BUBBLE_STEPS, run_breakdown
from megascale.operate.store.query import StoreError, fetch, store_of
from megascale.operate.store.reading import read_store

if TYPE_CHECKING:
    import duckdb

LEAST_PAUSE_S = 5.0
"""Seconds between two analyses of a run that goes on."""

MOST_SHARE = 0.1
"""Most of a core's time that repeated analyses take, with pauses of MOST_PAUSE_S at most."""

MOST_PAUSE_S = 30.0
"""Longest pause between two analyses, unless one takes longer: what is shown is never much older."""

STOP_S = 10.0
"""Longest wait for an analysis that is interrupted."""

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
    events that were overwritten before they were read. `notes`: what could not be read, or cannot be known.
    """

    heat: HeatMap
    slowness: np.ndarray
    memory: np.ndarray
    nodes: tuple[str, ...]
    findings: tuple[Finding, ...]
    breakdown: MfuBreakdown | None
    hosts: HostComparison | None = None
    lost: int = 0
    notes: tuple[str, ...] = ()

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
    return StoreView(
        heat_map(cube),
        _by_rank(world, cube.places.rank, _slowness(cube)),
        _memory(store, world),
        _nodes(cube, world),
        tuple(findings(store)),
        run_breakdown(store, folder, cube),
        hosts if hosts.hosts else None,
        int(fetch(store, "SELECT coalesce(sum(events_lost), 0) AS lost FROM steps")["lost"][0]),
        tuple(filter(None, (crowd_note(cube.places),))),
    )


def _slowness(cube: StepCube) -> np.ndarray:
    compared = compare(cube, cube.compute[:, :, None], cube.places.codes("pp"))
    return (compared.seconds / np.maximum(compared.peer_s, 1e-12) - 1)[:, 0]


def _by_rank(world: int, ranks: np.ndarray, values: np.ndarray) -> np.ndarray:
    found = np.full(world, np.nan)
    found[ranks] = values
    return found


def _memory(store: duckdb.DuckDBPyConnection, world: int) -> np.ndarray:
    rows = fetch(store, f"SELECT rank, max(peak_memory_bytes) AS bytes FROM steps WHERE {_LAST} GROUP BY rank")
    return _by_rank(world, rows["rank"], rows["bytes"])


def _nodes(cube: StepCube, world: int) -> tuple[str, ...]:
    names = [""] * world
    for rank, node in zip(cube.places.rank.tolist(), cube.places.node.tolist(), strict=True):
        names[rank] = cube.places.nodes[node]
    return tuple(names)


class StoreFollower:
    """Analyses of a run that goes on, in a thread, from `start` to `stop`. `latest`: None before the first; `error`:
    why there is no newer one; `version`: counts the analyses; `analysed`: time of the last that succeeded, as
    `time.monotonic`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: tuple[int, ...] | None = None
        self._store: duckdb.DuckDBPyConnection | None = None
        self.latest: StoreView | None = None
        self.error = ""
        self.version = 0
        self.analysed = 0.0
        self.ended, self._due = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="event store", daemon=True)

    def start(self) -> StoreFollower:
        """Start the thread, and return this object."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Interrupt the present analysis, and end the thread; give up after STOP_S. A process that ends while DuckDB
        computes aborts.
        """
        import duckdb

        self.ended.set()
        self._due.set()
        until = time.monotonic() + STOP_S
        while self._thread.is_alive() and time.monotonic() < until:
            if self._store is not None:
                with contextlib.suppress(duckdb.Error):  # it has been closed
                    self._store.interrupt()
            self._thread.join(0.1)

    def _opened(self, store: duckdb.DuckDBPyConnection) -> None:
        self._store = store

    def hasten(self) -> None:
        """Analyse soon, without the rest of the pause: the run has ended."""
        self._due.set()

    @property
    def note(self) -> str:
        """A line about the analyses: why there is none or no newer one, or their age and newest step."""
        if self.latest is None:
            waits = "no step is in the event store yet" if self.version else "the event store is being read"
            return f"no analyses: {self.error or waits}"
        age = f"analysed {format_duration(time.monotonic() - self.analysed)} ago, up to step {self.latest.last_step:,}"
        return "; ".join(filter(None, (age, self.error, *self.latest.notes)))

    def _follow(self) -> None:
        while not self.ended.is_set():
            started, is_first = time.process_time(), not self.version  # the first also imports
            began = time.monotonic()
            try:
                self.refresh()
            except Exception as error:  # a bug: the reader of the page learns it, and newer files may be read again
                self.error = f"an analysis has failed: {error!r}; megascale report {self._folder} shows where"
            pause_s = 0.0 if is_first else (time.process_time() - started) / MOST_SHARE
            self._due.wait(min(max(LEAST_PAUSE_S, pause_s), max(MOST_PAUSE_S, time.monotonic() - began)))
            self._due.clear()

    def refresh(self) -> None:
        """Analyse the store now, if its files have changed."""
        files = _files(self._folder)
        if files is not None and files == self._files:
            return
        self._files = files
        self.version += 1
        try:
            self.latest, self.error = read_store_view(self._folder, self._opened), ""
            self.analysed = time.monotonic()
        except MegascaleError as error:
            self.error = str(error)
            if self.ended.is_set():  # interrupted: the caller may want the last analysis
                self._files = None


def _files(folder: Path) -> tuple[int, ...] | None:
    """Return the times at which a table of a local store got its last file; None for a store elsewhere."""
    try:
        store = store_of(folder).local_path
        return None if store is None else tuple(path.stat().st_mtime_ns for path in sorted(store.iterdir()))
    except (MegascaleError, OSError):
        return None
