"""Analyses of the event store of a run that goes on, again and again in a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.core.errors import MegascaleError
from megascale.core.units import format_duration
from megascale.operate.show.store_view import StoreView, read_store_view
from megascale.operate.store.query import store_of

if TYPE_CHECKING:
    import duckdb

LEAST_PAUSE_S = 5.0  # seconds between two analyses of a run that goes on
MOST_SHARE = 0.1  # most of a core's time that repeated analyses take, with pauses of MOST_PAUSE_S at most
MOST_PAUSE_S = 30.0  # longest pause between two analyses, unless one takes longer: what is shown is never much older
STOP_S = 10.0  # longest wait for an analysis that is interrupted


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
    def problem(self) -> str:
        """Why there are no analyses, or no newer ones."""
        return self.error or ("" if self.latest is not None else self.note)

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
                self.error = f"an analysis has failed: {error!r}; megascale diagnose {self._folder} --slow shows where"
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
