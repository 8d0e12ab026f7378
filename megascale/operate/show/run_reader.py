"""Reading of a run's folder, again and again while the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from megascale.config.run import RunConfig
from megascale.core.files import exists
from megascale.core.named_run import CONFIG_FILE, METRICS_FILE, RunFolderError, no_run
from megascale.operate.driver.incidents import LOG_FILE, JobHistory, read_history
from megascale.operate.show.curves import MetricsFile
from megascale.operate.show.live_reader import LiveStateReader
from megascale.operate.show.run_config import read_run_config
from megascale.operate.show.run_view import RunView
from megascale.operate.show.standstill import with_standstill
from megascale.record.live_file import LIVE_FILE

RUN_FILES = (CONFIG_FILE, METRICS_FILE, LOG_FILE, LIVE_FILE)  # files any of which makes a folder a run's


class RunReader:
    """Reads the folder of a run; `read` costs little if little has changed. Raises: RunFolderError"""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        try:
            known = any(exists(folder / name) for name in RUN_FILES)
        except OSError as error:
            raise _unreadable(error, folder) from None
        if not known:
            raise no_run(folder)
        self.folder = folder
        self._metrics = MetricsFile(folder / METRICS_FILE)
        self._states = LiveStateReader(folder, clock)
        self._config: RunConfig | None = None
        self._config_version: tuple[int, int] | None = None
        self._history = JobHistory()
        self._history_version: tuple[int, int] | None = None

    def read(self) -> RunView:
        """Return what the folder says now. Raises: RunFolderError, MegascaleError for an unreadable log"""
        try:
            if (version := _version(self.folder / CONFIG_FILE)) != self._config_version:
                self._config, self._config_version = read_run_config(self.folder), version
            if (version := _version(self.folder / LOG_FILE)) != self._history_version:
                self._history, self._history_version = read_history(self.folder / LOG_FILE), version
            curves = self._metrics.read()
            states = self._states.read()
        except OSError as error:
            raise _unreadable(error, self.folder) from None
        except ValueError as error:
            raise RunFolderError(str(error), hint="remove the file, or give another folder") from None
        return with_standstill(RunView(self.folder, self._config, curves, self._history, states))


def _unreadable(error: OSError, folder: Path) -> RunFolderError:
    message = f"{error.filename or folder}: cannot be read: {error.strerror}"
    return RunFolderError(message, hint="check its permissions")


def _version(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_mtime_ns, facts.st_size
