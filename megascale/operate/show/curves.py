"""Curves over steps from a run's metrics.jsonl, read again and again while the file grows.

A record of step N removes what earlier records said of N and of later steps: training went back, and the later record
and those after it count.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megascale.core.units import format_count
from megascale.record.metrics import Alert

METRICS = ("loss", "grad_norm", "lr", "step_time_s", "tokens_per_s", "mfu_full", "mfu_causal", "peak_memory_bytes")
"""Metrics of logged steps that have a curve. A curve lacks what a record lacks, such as MFU without a peak: NaN."""

MOST_POINTS = 2000  # most points of a drawn curve
MOST_CASTS = 100  # newest records whose statistics of FP8 casts are kept

CastRecords = tuple[tuple[int, Mapping[str, Mapping[str, float]]], ...]
"""(step, statistics by operand and name) of logged steps."""


class CurveKind(NamedTuple):
    """How the curve of a metric is shown: its title, a short one, and the formats of a value (with its `unit` where
    none is said), of a tick, and of a tick in d3's words.
    """

    title: str
    label: str
    value: Callable[[float], str]
    tick: Callable[[float], str]
    d3: str
    unit: str = ""

    def text(self, value: float) -> str:
        """Return a value with its unit."""
        return self.value(value) + (self.unit if math.isfinite(value) else "")


CURVES = {
    "loss": CurveKind("loss", "loss", "{:.4f}".format, "{:.3g}".format, "~g"),
    "grad_norm": CurveKind("gradient norm", "grad norm", "{:.3g}".format, "{:.3g}".format, "~g"),
    "tokens_per_s": CurveKind(
        "tokens per second", "throughput", lambda speed: format_count(speed) if math.isfinite(speed) else "",
        format_count, "~s", " tok/s",
    ),
    "mfu_full": CurveKind(
        "MFU, full attention", "MFU full", lambda mfu: f"{mfu:.1%}" if math.isfinite(mfu) else "n/a",
        lambda mfu: f"{100 * mfu:.3g}%", ".1%",
    ),
}  # fmt: skip
"""The curves that are shown, by metric."""


@dataclass(frozen=True)
class Curves:
    """`steps`: of the records, ascending. `values`: an array by metric. `valid`: (step, validation loss). `sharpness`:
    (step, sharpness of logits). `casts`: the newest.
    """

    steps: np.ndarray
    values: Mapping[str, np.ndarray]
    valid: tuple[tuple[int, float], ...] = ()
    alerts: tuple[Alert, ...] = ()
    sharpness: tuple[tuple[int, float], ...] = ()
    casts: CastRecords = ()

    @cached_property
    def last(self) -> dict[str, float]:
        """The values of the last record."""
        return {name: float(column[-1]) for name, column in self.values.items()} if len(self.steps) else {}

    @property
    def last_step(self) -> int:
        """The step of the last record, 0 without one."""
        return int(self.steps[-1]) if len(self.steps) else 0

    def drawn(self, metric: str, points: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and finite values of a metric, thinned to about `points`: of each part of the curve its lowest
        and its highest value, so that no spike is lost, and the last.
        """
        keep = np.isfinite(self.values[metric])
        x, y = self.steps[keep], self.values[metric][keep]
        if len(x) <= points:
            return x, y
        kept = {len(x) - 1}
        for start, end in itertools.pairwise(np.linspace(0, len(x), max(1, points // 2) + 1).astype(int)):
            if end > start:
                kept |= {start + int(np.argmin(y[start:end])), start + int(np.argmax(y[start:end]))}
        index = np.array(sorted(kept))
        return x[index], y[index]


class MetricsFile:
    """A file of metrics, of which `read` parses what is new. A file that was replaced or cut, as by a resume, is read
    from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._logged: list[tuple[int, list[float]]] = []
        self._valid: list[tuple[int, float]] = []
        self._alerts: list[Alert] = []
        self._sharpness: list[tuple[int, float]] = []
        self._casts: deque[tuple[int, dict[str, dict[str, float]]]] = deque(maxlen=MOST_CASTS)
        self._curves: Curves | None = None

    def read(self) -> Curves:
        """Return the curves of all whole lines. An absent file is empty. Raises: OSError"""
        if text := self._new_text():
            for line in text.splitlines():
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):  # a line cut by a full disk
                    self._add(json.loads(line))
            self._curves = None
        if self._curves is None:
            steps = np.array([step for step, _ in self._logged], dtype=np.int64)
            columns = np.array([values for _, values in self._logged], dtype=float).reshape(-1, len(METRICS)).T
            values = dict(zip(METRICS, columns, strict=True))
            sharpness, casts = tuple(self._sharpness), tuple(self._casts)
            self._curves = Curves(steps, values, tuple(self._valid), tuple(self._alerts), sharpness, casts)
        return self._curves

    def _new_text(self) -> bytes:
        try:
            file = open(self._path, "rb")  # noqa: SIM115  closed below
        except FileNotFoundError:
            return b""
        with file:
            facts = os.fstat(file.fileno())
            if facts.st_ino != self._inode or facts.st_size < self._offset:
                self._forget()
                self._inode = facts.st_ino
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole

    def _add(self, record: dict[str, Any]) -> None:
        """Add a record. Raises: ValueError, TypeError or KeyError for anything else"""
        step = int(record["step"])
        if "loss" in record:
            _append(self._logged, (step, [float(record.get(name, math.nan)) for name in METRICS]))
            if "fp8" in record:
                _append(self._casts, (step, record["fp8"]))
        elif "valid_loss" in record:
            _append(self._valid, (step, float(record["valid_loss"])))
        elif "logit_sharpness" in record:
            _append(self._sharpness, (step, float(record["logit_sharpness"])))
        elif "alert" in record:
            self._alerts.append(Alert(step, str(record["alert"]), float(record["value"]), float(record["recent"])))


def _append(entries: list | deque, entry: tuple[int, Any]) -> None:
    """Append an entry, and drop those of its step and later ones."""
    while entries and entries[-1][0] >= entry[0]:
        entries.pop()
    entries.append(entry)
