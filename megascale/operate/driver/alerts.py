"""Alerts of a run, which rank 0 writes among the metrics: loss and gradient norm far above their recent median, and
pipeline stages that a start has rebuilt.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from megascale.core.files import exists
from megascale.record.metrics import Alert, RebuiltStages


class AlertReader:
    """The alerts that are appended to a file of metrics from now on. A file that is replaced or shrinks, when a run
    resumes, is read from its start: it may have alerts once more.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        facts = path.stat() if exists(path) else None
        self._inode, self._offset = (facts.st_ino, facts.st_size) if facts else (-1, 0)

    def new(self) -> Iterator[Alert | RebuiltStages]:
        """Yield the alerts since the last call."""
        try:
            with open(self._path, "rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._inode or facts.st_size < self._offset:
                    self._inode, self._offset = facts.st_ino, 0
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, TypeError):  # a line cut by a full disk
                if b'"alert":' in line:
                    yield Alert(**json.loads(line))
                elif b'"rebuilt":' in line:
                    yield RebuiltStages(**json.loads(line))
