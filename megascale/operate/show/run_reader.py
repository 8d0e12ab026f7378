"""Reading of a run's folder, again and again while the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from megascale.core.files import exists
from megascale.core.named_run import CONFIG_FILE, RunFolderError, no_run
from megascale.core.run_folder import METRICS_FILE
from megascale.operate.driver.incidents import LOG_FILE, read_history
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
        self._config = lru_cache(1)(lambda version: read_run_config(folder))
        self._history = lru_cache(1)(lambda version: read_history(folder / LOG_FILE))

    def read(self) -> RunView:
        """Return what the folder says now. Raises: RunFolderError, MegascaleError for an unreadable log"""
        try:
            config = self._config(_version(self.folder / CONFIG_FILE))
            history = self._history(_version(self.folder / LOG_FILE))
            curves = self._metrics.read()
            states = self._states.read()
        except OSError as error:
            raise _unreadable(error, self.folder) from None
        except ValueError as error:
            raise RunFolderError(str(error), hint="remove the file, or give another folder") from None
        return with_standstill(RunView(self.folder, config, curves, history, states))


def _unreadable(error: OSError, folder: Path) -> RunFolderError:
    message = f"{error.filename or folder}: cannot be read: {error.strerror}"
    return RunFolderError(message, hint="check its permissions")


def _version(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_mtime_ns, facts.st_size
