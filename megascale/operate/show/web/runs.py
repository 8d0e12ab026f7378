"""The runs that a dashboard shows: each read at most once a second, whoever asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path

from megascale.core.errors import MegascaleError
from megascale.operate.show.run_reader import RunReader
from megascale.operate.show.run_view import RunView
from megascale.operate.show.store_follower import StoreFollower

FRESH_S = 1.0  # seconds in which what was read is given again


class WatchedRun:
    """A run. `name`: unique in the dashboard; `problem`: why it could not be read the last time, "" otherwise; `store`:
    the analyses of its event store.

    Raises: RunFolderError
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.problem = ""
        self._reader = RunReader(folder)
        self._lock = threading.Lock()
        self._view = self._reader.read()
        self._read = time.monotonic()
        self.store = StoreFollower(folder).start()

    def view(self) -> RunView:
        """Return the model of the run."""
        with self._lock:
            if time.monotonic() - self._read > FRESH_S:
                try:
                    had_ended = self._view.has_ended
                    self._view, self.problem = self._reader.read(), ""
                    if self._view.has_ended and not had_ended:
                        self.store.hasten()
                except MegascaleError as error:
                    self.problem = str(error)
                self._read = time.monotonic()
            return self._view

    def close(self) -> None:
        """End the analyses."""
        self.store.stop()

    @property
    def news(self) -> tuple:
        """A value that differs whenever there is something new."""
        view = self.view()
        incidents = len(view.incidents)
        return view.step, view.curves.last_step, view.state, incidents, self.store.version, self.store.problem


def watched_runs(folders: Iterable[Path]) -> dict[str, WatchedRun]:
    """Return runs by name; runs of one name are told apart by their folders. Raises: RunFolderError"""
    found: dict[str, WatchedRun] = {}
    for folder in folders:
        name = folder.resolve().name
        name = f"{name} ({folder.resolve().parent})" if name in found else name
        found.setdefault(name, WatchedRun(name, folder))
    return found
