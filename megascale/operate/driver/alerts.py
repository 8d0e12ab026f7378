"""Alerts of a run: loss and gradient norm far above their recent median, which rank 0 writes among the metrics."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megascale.core.files import exists

METRICS_FILE = "metrics.jsonl"  # the file of metrics in the run's folder


class AlertReader:
    """The alerts that are appended to a file of metrics from now on. A file that shrinks, when a run resumes at an
    earlier step, is read from its new end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if exists(path) else 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the alerts since the last call: `step`, `alert` (a metric), `value` and `recent` (its median)."""
        try:
            with open(self._path, "rb") as file:
                size = file.seek(0, 2)
                file.seek(min(self._offset, size))
                text = file.read()
        except OSError:
            return
        end = text.rfind(b"\n") + 1
        self._offset = min(self._offset, size) + end
        for line in text[:end].splitlines():
            with contextlib.suppress(ValueError):  # a line cut by a full disk
                if b'"alert"' in line and "alert" in (record := json.loads(line)):
                    yield record
