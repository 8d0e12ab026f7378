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
from megascale.operate.show.store_view import StoreView

FRESH_S = 1.0
"""Seconds in which what was read is given again."""


class WatchedRun:
    """A run. `name`: unique in the dashboard; `problem`: why it could not be read the last time, "" otherwise.

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
        self._store = StoreFollower(folder).start()

    def view(self) -> RunView:
        """Return the model of the run."""
        with self._lock:
            if time.monotonic() - self._read > FRESH_S:
                try:
                    had_ended = self._view.has_ended
                    self._view, self.problem = self._reader.read(), ""
                    if self._view.has_ended and not had_ended:
                        self._store.hasten()
                except MegascaleError as error:
                    self.problem = str(error)
                self._read = time.monotonic()
            return self._view

    def close(self) -> None:
        """End the analyses."""
        self._store.stop()

    @property
    def store(self) -> StoreView | None:
        """The newest analyses of the run's event store; None before the first."""
        return self._store.latest

    @property
    def news(self) -> tuple:
        """A value that differs whenever there is something new."""
        view = self.view()
        return (
            view.step,
            view.curves.last_step,
            view.state,
            len(view.incidents),
            self._store.version,
            self.store_problem,
        )

    @property
    def store_problem(self) -> str:
        """Why there are no analyses."""
        return self._store.error or ("" if self._store.latest is not None else self._store.note)

    @property
    def store_note(self) -> str:
        """A line about the analyses: their age and newest step, or why there are none."""
        return self._store.note


def watched_runs(folders: Iterable[Path]) -> dict[str, WatchedRun]:
    """Return runs by name; runs of one name are told apart by their folders. Raises: RunFolderError"""
    found: dict[str, WatchedRun] = {}
    for folder in folders:
        name = folder.resolve().name
        name = f"{name} ({folder.resolve().parent})" if name in found else name
        found.setdefault(name, WatchedRun(name, folder))
    return found
